"""Tables that every rank holds whole: the same run as with sharded ones, from and into the same checkpoints."""

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
MORE = {"training.epochs": 1000, "training.evaluate_every_epochs": 0, "batch.batch_samples": 13}
STEPS, PLACEMENT = "training.max_steps", "tables.*.placement"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    make_datasets(folder)
    return str(folder)


def test_a_run_goes_on_with_other_placements_of_its_tables_to_the_bit(pools, data: str, tmp_path: Path) -> None:
    def on_2(run: str, more: dict[str, object]) -> list[dict[str, Any]]:
        return pools[2].run(train, "ranking", data, str(tmp_path / run), {**MORE, **more})

    whole = on_2("whole", {STEPS: 9})
    placements = {3: "sharded", 6: "replicated", 9: "auto"}
    parts = [on_2("run", {STEPS: step, PLACEMENT: placement}) for step, placement in placements.items()]
    assert [loss for part in parts for loss in part[0]["losses"]] == whole[0]["losses"]
    assert parts[-1][0]["digests"] == whole[0]["digests"]
    shards, copies = ([rank["slots"]["items"] for rank in part] for part in (parts[0], parts[1]))
    assert copies == [sum(shards)] * 2, "every rank held all rows"
    topics = [rank["slots"]["item_topic"] for rank in parts[-1]]
    assert topics == [2, 2], "all micro-batches ask for both of its rows, so fewer bytes cross of what all ranks hold"
    held = on_2("run", {STEPS: 10, PLACEMENT: "replicated"})
    with restored_session(tmp_path / "run", best=False) as (session, _):
        alone = {name: session.engine.digest(name) for name in session.engine.tables}
    assert alone == held[0]["digests"], "one rank reads what two saved, each a part of what both had"


@pytest.mark.slow
def test_evaluation_reads_tables_that_all_ranks_hold_as_it_reads_sharded_ones(pools, data: str, tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    train(Topology.single(), "hstu", data, run, {**MORE, STEPS: 3})
    found = [
        pools[2].run(measure, "hstu", data, run, {**MORE, STEPS: 3, PLACEMENT: p}) for p in ("sharded", "replicated")
    ]
    for sharded, replicated in zip(*found, strict=True):
        for part, details in sharded.items():
            for name, values in details.items():
                np.testing.assert_array_equal(values, replicated[part][name])


def sent(topology: Topology, placement: str) -> dict[str, int]:
    """Bytes that a rank sends in a step of three micro-batches, each of which asks for every row."""
    table = TableConfig(name="t", dim=5, num_rows=40, placement=placement)
    engine = EmbeddingEngine([table], topology)
    parts = [{"t": np.arange(40)}] * 3
    routed = engine.route(*parts)
    working = engine.fetch(routed, step=1)
    for p in range(3):
        vectors = engine.exchange_vectors(routed, working, p)["t"]
        engine.accumulate(routed, working, {"t": torch.ones_like(vectors)}, p)
    engine.update(working, learning_rate=0.1)
    statistics = engine.statistics
    return {leg: getattr(statistics, leg).bytes_sent for leg in ("vectors", "gradients", "replicas")}


def test_vectors_of_tables_that_all_ranks_hold_do_not_cross_and_sums_do_once(pools) -> None:
    sharded, replicated = (pools[2].run(sent, placement) for placement in ("sharded", "replicated"))
    assert [r["gradients"] for r in replicated] == [s["gradients"] for s in sharded]
    assert {s["replicas"] for s in sharded} == {r["vectors"] for r in replicated} == {0}
    assert sum(r["replicas"] for r in replicated) == 40 * 5 * 4
    assert sum(s["vectors"] for s in sharded) == 3 * 40 * 5 * 4
