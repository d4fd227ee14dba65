"""Ranks that were started with different configurations say so at once, instead of training on something else each."""

from nestrec.base.config import leaves
from nestrec.base.errors import UserError
from nestrec.distributed import Topology
from nestrec.distributed.exchange import all_gather_json
from nestrec.training.config import RunConfig


def agree_on_config(cfg: RunConfig, topology: Topology) -> None:
    """The same UserError on every rank, naming the first field that differs, unless all ranks were given the same."""
    first, *others = all_gather_json(topology.control, leaves(cfg))
    for rank, other in enumerate(others, start=1):
        for name in dict.fromkeys([*first, *other]):
            mine, theirs = first.get(name, "not there"), other.get(name, "not there")
            if mine != theirs:
                raise UserError(
                    f"differs between ranks: rank {rank} has {theirs!r}",
                    field=name,
                    value=mine,
                    remedy="start every rank with the same command",
                )
