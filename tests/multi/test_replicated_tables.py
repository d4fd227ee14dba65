"""Replicated tables: a run has the same results and the same checkpoints as with sharded tables."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_jobs import measure, train

from nestrec.distributed import Topology
from nestrec.embedding import EmbeddingEngine, TableConfig
from nestrec.exporters.servable_writer import restored_session
from support.tiny_runs import make_datasets

pytestmark = pytest.mark.timeout(300)
MORE = {"training.epochs": 1000, "training.eval_every_epochs": 0, "batch.batch_size": 13}
MAX_STEPS = "training.max_steps"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    make_datasets(folder)
    return str(folder)


def test_replicated_tables_resume_with_other_placement(pools, data: str, tmp_path: Path) -> None:
    def train_on_2(run: str, more: dict[str, object]) -> list[dict[str, Any]]:
        return pools[2].run(train, "ranking", data, str(tmp_path / run), {**MORE, **more})

    uninterrupted = train_on_2("uninterrupted", {MAX_STEPS: 9})
    placements = {3: "sharded", 6: "replicated", 9: "auto"}
    parts = [
        train_on_2("run", {MAX_STEPS: step, "tables.*.placement": placement}) for step, placement in placements.items()
    ]
    assert [loss for part in parts for loss in part[0]["losses"]] == uninterrupted[0]["losses"]
    assert parts[-1][0]["digests"] == uninterrupted[0]["digests"]
    shards, replicas = ([rank["slots"]["items"] for rank in part] for part in (parts[0], parts[1]))
    assert replicas == [sum(shards)] * 2, "every rank had all rows"
    topics = [rank["slots"]["item_topic"] for rank in parts[-1]]
    assert topics == [2, 2], "all micro-batches use both rows, so that replication sends fewer bytes"
    replicated = train_on_2("run", {MAX_STEPS: 10, "tables.*.placement": "replicated"})
    with restored_session(tmp_path / "run", best=False) as (session, _):
        alone = {name: session.engine.digest(name) for name in session.engine.tables}
    assert alone == replicated[0]["digests"], "one rank loads the rows of two ranks that each saved a part of a replica"


@pytest.mark.slow
def test_replicated_tables_evaluation_equals_sharded(pools, data: str, tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    train(Topology.single(), "hstu", data, run, {**MORE, MAX_STEPS: 3})
    results = [
        pools[2].run(measure, "hstu", data, run, {**MORE, MAX_STEPS: 3, "tables.*.placement": p})
        for p in ("sharded", "replicated")
    ]
    for sharded, replicated in zip(*results, strict=True):
        for part, details in sharded.items():
            for name, values in details.items():
                np.testing.assert_array_equal(values, replicated[part][name])


def bytes_sent(topology: Topology, placement: str) -> dict[str, int]:
    """Return the bytes that a rank sends in a step of three micro-batches that each use every row."""
    table = TableConfig(name="t", dim=5, num_rows=40, placement=placement)
    engine = EmbeddingEngine([table], topology)
    parts = [{"t": np.arange(40)}] * 3
    routed = engine.route(*parts)
    working = engine.fetch_rows(routed, step=1)
    for p in range(3):
        vectors = engine.exchange_vectors(routed, working, p)["t"]
        engine.accumulate(routed, working, {"t": torch.ones_like(vectors)}, p)
    engine.update(working, learning_rate=0.1)
    statistics = engine.statistics
    return {leg: getattr(statistics, leg).bytes_sent for leg in ("vectors", "gradients", "replicas")}


def test_replicated_tables_send_only_gradient_sums(pools) -> None:
    sharded, replicated = (pools[2].run(bytes_sent, placement) for placement in ("sharded", "replicated"))
    assert [r["gradients"] for r in replicated] == [s["gradients"] for s in sharded]
    assert {s["replicas"] for s in sharded} == {r["vectors"] for r in replicated} == {0}
    assert sum(r["replicas"] for r in replicated) == 40 * 5 * 4
    assert sum(s["vectors"] for s in sharded) == 3 * 40 * 5 * 4
