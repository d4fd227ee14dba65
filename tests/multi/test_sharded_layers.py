"""Layers of which every rank holds a slice train as those that every rank holds, to rounding."""

from pathlib import Path
from typing import Any

import pytest
import torch
from dense_jobs import die_in_pass
from training_jobs import train, train_without_warnings

from nestrec.distributed import Topology
from nestrec.exporters.servable_writer import servable_of_run
from support.rank_pool import RankPool
from support.tiny_runs import make_datasets

FUXI = '{"kind": "fuxi", "num_layers": 2, "num_heads": 1, "ffn_dim": 8}'
ALL = {
    "optimizer.clip_norm": 0.5,
    "optimizer.ema": 0.9,
    "optimizer.weight_decay": 0.1,
    "optimizer.weight_decay_of": "matrices",
    "batch.batch_samples": 13,
    "training.epochs": 1,
}
"""Batches of 13 of 40 users end an epoch with one sample: ranks without one take part in its passes."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    make_datasets(folder)
    return str(folder)


def check_same(ranks: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """To rounding: losses, weights, moments, running means and row by row what the tables hold."""
    # Not by torch.testing, which loads distributed tensors first: that takes longer than the runs.
    for mine, theirs in zip(ranks, expected, strict=True):
        assert mine["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
        assert set(mine["dense"]) == set(theirs["dense"])
        for name, tensor in mine["dense"].items():
            if "key.bias" not in name:  # its gradient is rounding alone, a softmax does not see it
                assert torch.allclose(tensor, theirs["dense"][name], rtol=1e-3, atol=1e-5), name


@pytest.mark.parametrize(
    ("family", "world", "more"),
    [
        ("sasrec", 2, {}),
        ("ranking", 2, {"task.encoder": FUXI, "pipeline.schedule": "priority"}),
        *(pytest.param(family, 4, {}, marks=pytest.mark.slow) for family in ("hstu", "sasrec", "ranking")),
    ],
)
def test_sharded_layers_equal_replicated_ones_to_rounding(  # noqa: PLR0917
    pools, tmp_path, data, family, world, more
):
    runs = {}
    for dense in ("replicated", "fsdp"):
        options = {**ALL, **more, "ranks.dense": dense}
        runs[dense] = pools[world].run(train_without_warnings, family, data, str(tmp_path / dense), options)
    check_same(runs["fsdp"], runs["replicated"])
    held, whole = (sum(rank["held_dense"] for rank in runs[dense]) for dense in ("fsdp", "replicated"))
    assert held < 0.8 * whole, "positions and heads are on every rank, slices of layers on one"


def test_checkpoints_and_exports_are_the_same_whoever_holds_what_on_any_ranks(pools, tmp_path, data):
    """Saved by slices on two ranks, gone on with by one rank, saved there, and gone on with by slices again."""
    options = {**ALL, "training.epochs": 3, "pipeline.schedule": "nested"}
    expected = pools[2].run(train, "hstu", data, str(tmp_path / "whole"), options)
    folder = str(tmp_path / "moved")
    for epochs, dense in ((1, "fsdp"), (2, "replicated"), (3, "fsdp")):
        more = {**options, "training.epochs": epochs, "ranks.dense": dense}
        if dense == "fsdp":
            moved = pools[2].run(train, "hstu", data, folder, more)
        else:
            train(Topology.single(), "hstu", data, folder, more)
    steps = len(moved[0]["losses"])
    assert 0 < steps < len(expected[0]["losses"])
    check_same(moved, [{**rank, "losses": rank["losses"][-steps:]} for rank in expected])
    servable = servable_of_run(Path(folder), tmp_path, best=False)
    for name, weight in servable.model.state_dict().items():
        assert torch.equal(weight, moved[0]["dense"][f"mean/{name}"]), "an export takes the whole of the running means"


@pytest.mark.parametrize(
    ("family", "more", "why"),
    [
        ("rows", {}, "no encoder with `layers`"),
        (
            "hstu",
            {"publish.address": "versions", "publish.every_steps": 5},
            "a version is written from the whole model",
        ),
    ],
)
def test_what_cannot_be_combined_is_refused_with_the_reason(  # noqa: PLR0917
    pools, tmp_path, data, family, more, why
):
    options = {**more, "ranks.dense": "fsdp"}
    for outcome in pools[2].outcomes(train, family, data, str(tmp_path / "run"), options):
        assert outcome.kind == "UserError"
        assert why in outcome.text
        assert "ranks.dense" in outcome.text


def test_a_peer_that_dies_inside_a_pass_is_named():
    pool = RankPool(2, timeout_s=60)  # a death is heard of at once
    survivor, _ = pool.outcomes(die_in_pass, timeout_s=100)
    pool.close()
    assert survivor.kind == "PeerLostError"
    assert "a peer was lost in dense.layer_" in survivor.text
