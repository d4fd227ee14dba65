"""FSDP: layers that are sharded over ranks train like replicated layers, up to rounding."""

from pathlib import Path
from typing import Any

import pytest
import torch
from dense_jobs import die_in_pass
from training_jobs import train, train_without_warnings

from nestrec.distributed import Topology
from nestrec.exporters.servable_writer import servable_from_run
from support.rank_pool import RankPool
from support.tiny_runs import make_datasets

FUXI = '{"kind": "fuxi", "num_layers": 2, "num_heads": 1, "ffn_dim": 8}'
OPTIONS = {
    "optimizer.max_grad_norm": 0.5,
    "optimizer.ema_decay": 0.9,
    "optimizer.weight_decay": 0.1,
    "optimizer.weight_decay_on": "matrices",
    "batch.batch_size": 13,
    "training.epochs": 1,
}
"""With a batch size of 13 and 40 users, the last batch has one sample, and ranks without a sample take part in it."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    make_datasets(folder)
    return str(folder)


def check_close(ranks: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Check that losses, weights, moments and moving averages are equal up to rounding."""
    # torch.testing is not used, because it loads distributed tensors, which takes longer than the runs.
    for rank, expected_rank in zip(ranks, expected, strict=True):
        assert rank["losses"] == pytest.approx(expected_rank["losses"], rel=1e-5)
        assert set(rank["dense"]) == set(expected_rank["dense"])
        for name, tensor in rank["dense"].items():
            if "key.bias" not in name:  # its gradient consists of rounding errors, because it does not change a softmax
                assert torch.allclose(tensor, expected_rank["dense"][name], rtol=1e-3, atol=1e-5), name


@pytest.mark.parametrize(
    ("family", "world", "more"),
    [
        ("sasrec", 2, {}),
        ("ranking", 2, {"task.encoder": FUXI, "pipeline.schedule": "priority"}),
        *(pytest.param(family, 4, {}, marks=pytest.mark.slow) for family in ("hstu", "sasrec", "ranking")),
    ],
)
def test_fsdp_layers_equal_replicated_layers(  # noqa: PLR0917
    pools, tmp_path, data, family, world, more
):
    runs = {}
    for dense in ("replicated", "fsdp"):
        options = {**OPTIONS, **more, "parallel.dense": dense}
        runs[dense] = pools[world].run(train_without_warnings, family, data, str(tmp_path / dense), options)
    check_close(runs["fsdp"], runs["replicated"])
    sharded, replicated = (sum(rank["num_local_weights"] for rank in runs[dense]) for dense in ("fsdp", "replicated"))
    assert sharded < 0.8 * replicated, "position embeddings and heads are replicated, and layers are sharded"


def test_fsdp_checkpoints_and_exports_equal_replicated(pools, tmp_path, data):
    """A run is saved with FSDP on two ranks, resumed on one rank, and resumed with FSDP on two ranks."""
    options = {**OPTIONS, "training.epochs": 3, "pipeline.schedule": "nested"}
    expected = pools[2].run(train, "hstu", data, str(tmp_path / "uninterrupted"), options)
    folder = str(tmp_path / "moved")
    for epochs, dense in ((1, "fsdp"), (2, "replicated"), (3, "fsdp")):
        more = {**options, "training.epochs": epochs, "parallel.dense": dense}
        if dense == "fsdp":
            moved = pools[2].run(train, "hstu", data, folder, more)
        else:
            train(Topology.single(), "hstu", data, folder, more)
    steps = len(moved[0]["losses"])
    assert 0 < steps < len(expected[0]["losses"])
    check_close(moved, [{**rank, "losses": rank["losses"][-steps:]} for rank in expected])
    servable = servable_from_run(Path(folder), tmp_path, best=False)
    for name, weight in servable.model.state_dict().items():
        assert torch.equal(weight, moved[0]["dense"][f"mean/{name}"]), (
            "an export contains the unsharded moving averages"
        )


@pytest.mark.parametrize(
    ("family", "more", "message"),
    [
        ("rows", {}, "the model needs an encoder with `layers`"),
        (
            "hstu",
            {"publish.address": "versions", "publish.every_steps": 5},
            "cannot publish versions while training with fsdp",
        ),
    ],
)
def test_fsdp_rejects_unsupported_combinations(  # noqa: PLR0917
    pools, tmp_path, data, family, more, message
):
    options = {**more, "parallel.dense": "fsdp"}
    for outcome in pools[2].outcomes(train, family, data, str(tmp_path / "run"), options):
        assert outcome.kind == "UserError"
        assert message in outcome.text
        assert "parallel.dense" in outcome.text


def test_fsdp_peer_failure_is_named():
    pool = RankPool(2, timeout_s=60)  # a death is detected at once
    survivor, _ = pool.outcomes(die_in_pass, timeout_s=100)
    pool.close()
    assert survivor.kind == "PeerLostError"
    assert "peer was lost in dense.layer_" in survivor.text
