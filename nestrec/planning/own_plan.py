"""Whether a run fits as it is configured: asked before anything is allocated."""

from dataclasses import replace

from nestrec.base.errors import UserError
from nestrec.pipeline.arguments import check_cut
from nestrec.planning.advice import shortages
from nestrec.planning.candidate import Candidate, Space
from nestrec.planning.cluster import ClusterConfig
from nestrec.planning.outcome import Outcome, Predictor
from nestrec.planning.profile import StoreKind
from nestrec.planning.workload import TableLoad, Workload
from nestrec.training.config import RunConfig


def candidate_of(cfg: RunConfig, store: StoreKind = "device") -> Candidate:
    """The run's own choices. Micro-batches that are chosen while training count as one, which needs most memory."""
    parts = cfg.batch.micro_batches if isinstance(cfg.batch.micro_batches, int) else 1
    exchange = cfg.ranks.exchange
    return Candidate(
        schedule=cfg.pipeline.schedule,
        micro_batches=parts,
        store=store,
        policy=cfg.balance.policy,
        window_cache=cfg.pipeline.window_cache,
        replicas=cfg.ranks.replicas,
        transport=exchange if exchange in ("host", "copy_engine") else "collectives",
    )


def largest_of(workload: Workload) -> TableLoad:
    """The table with most to keep."""
    return max(workload.tables, key=lambda table: table.rows * table.row_bytes)


def check_replicas(replicas: int, world: int) -> None:
    """Raise a UserError where ranks cannot form so many groups."""
    if world % replicas:
        remedy = f"choose a divisor of {world}"
        raise UserError("must divide the number of ranks", field="ranks.replicas", value=replicas, remedy=remedy)


def check_micro_batches(micro_batches: int, workload: Workload) -> None:
    """Raise a UserError where a global batch has fewer samples; before so many are rehearsed."""
    check_cut(micro_batches, workload.batch_samples, "a global batch", field="batch.micro_batches")


def check_fits(cfg: RunConfig, workload: Workload, cluster: ClusterConfig) -> Outcome:
    """Predicted figures of the run as configured, or a UserError that says what is short and what would fix it."""
    # Time is reckoned with one store: that of the table with most to keep. Memory is that of each where it is.
    store = largest_of(workload).store
    tables = tuple(replace(table, keeps_store=table.store != store) for table in workload.tables)
    workload = replace(workload, tables=tables)
    predictor, candidate = Predictor(workload, cluster), candidate_of(cfg, store)
    check_replicas(candidate.replicas, cluster.world)
    check_micro_batches(candidate.micro_batches, workload)
    found = shortages(predictor, candidate, Space().on(cluster, workload))
    if found:
        short = found[0]
        remedy = " or ".join(short.remedies) or "use larger hosts"
        field = f"memory of the {short.tier} tier, bytes"
        raise UserError(f"the plan does not fit: {short}", field=field, value=round(short.memory.needed), remedy=remedy)
    return predictor.predict(candidate)
