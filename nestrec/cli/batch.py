"""`nestrec recommend` and `nestrec embed`: files for very many users."""

import time
from collections.abc import Sequence
from pathlib import Path

import typer

from nestrec.base.config import with_overrides
from nestrec.base.devices import chosen_device
from nestrec.base.errors import UserError, did_you_mean
from nestrec.base.overriding import parse_overrides
from nestrec.distributed import Topology
from nestrec.library.batch import BatchJobConfig, BatchRecommender
from nestrec.library.loaded import load

_NAMES = ("output", "users", "data", "device", "what")


def recommend_users(
    model: str, users: str, output: Path, *, data: Path | None, device: str, words: Sequence[str]
) -> None:
    batch, topology = _batch(model, device, words)
    start_s = time.perf_counter()
    count = batch.recommend(users, output, data=data)
    _say(topology, count, "users", output, start_s, num_without=batch.num_without)


def embed_all(
    model: str, what: str, users: str, output: Path, *, data: Path | None, device: str, words: Sequence[str]
) -> None:
    if what not in ("users", "items"):
        raise UserError("has no vectors", field="--what", value=what, remedy=did_you_mean(what, ("users", "items")))
    batch, topology = _batch(model, device, words)
    start_s = time.perf_counter()
    if what == "items":
        count = batch.embed_items(output)
    else:
        count = batch.embed_users(users, output, data=data)
    _say(topology, count, what, output, start_s, num_without=batch.num_without)


def _batch(model: str, device: str, words: Sequence[str]) -> tuple[BatchRecommender, Topology]:
    cfg = with_overrides(BatchJobConfig(), parse_overrides(words, _NAMES))
    topology = Topology.from_environment(chosen_device(device))
    return load(model, device=str(topology.device)).batch(cfg, topology), topology


def _say(topology: Topology, count: int, what: str, output: Path, start_s: float, *, num_without: int) -> None:
    if topology.is_first:
        seconds = time.perf_counter() - start_s
        typer.echo(f"{output}: {count:,} {what} in {seconds:.1f} s ({count / max(seconds, 1e-9):,.0f} a second)")
        if num_without:
            typer.echo(f"{num_without:,} of them got nothing: the model knows no event of theirs", err=True)
