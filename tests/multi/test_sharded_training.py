"""Sharded training equals unsharded training on any number of ranks."""

import numpy as np
import pytest
import torch
from engine_jobs import LEARNING_RATE, NUM_ROWS, global_batch, sample_loss, tables, train

from nestrec.distributed import Topology
from nestrec.embedding import EmbeddingEngine
from nestrec.pipeline.dense.dense_optimizer import DenseOptimizer, OptimizerConfig

KINDS = ["sgd", "adagrad", "rowwise_adagrad", "adam", "rowwise_adam"]
USERS = np.arange(-20, 20) * 2**57


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


class RowWise(torch.optim.Optimizer):
    """Reference implementation of the row-wise optimizers, on dense gradients of the rows that a batch used."""

    def __init__(self, parameters, kind):
        super().__init__(parameters, {"kind": kind})
        self.t = 0

    def step(self):
        self.t += 1
        for p in self.param_groups[0]["params"]:
            used = torch.zeros(len(p), dtype=torch.bool).index_fill_(0, p.used, True)
            g = p.grad[used]
            s = self.state[p].setdefault("v", torch.zeros(len(p), 1, dtype=p.dtype))
            if self.param_groups[0]["kind"] == "rowwise_adagrad":
                s[used] += (g**2).mean(1, keepdim=True)
                p.data[used] -= LEARNING_RATE * g / (s[used].sqrt() + 1e-8)
            else:
                m = self.state[p].setdefault("m", torch.zeros_like(p.data))
                m[used] = 0.9 * m[used] + 0.1 * g
                s[used] = 0.999 * s[used] + 0.001 * (g**2).mean(1, keepdim=True)
                rate = LEARNING_RATE * (1 - 0.999**self.t) ** 0.5 / (1 - 0.9**self.t)
                p.data[used] -= rate * m[used] / (s[used].sqrt() + 1e-8)


def unsharded(kind: str, num_steps: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train with torch.nn.Embedding and the optimizers of torch, and return the tables and the losses."""
    engine = EmbeddingEngine(tables(kind), Topology.single())
    initial = engine.lookup_readonly({"history": np.arange(NUM_ROWS), "target": np.empty(0, np.int64), "user": USERS})
    is_sparse = kind == "adam"
    item = torch.nn.Embedding.from_pretrained(initial["history"].clone(), freeze=False, sparse=is_sparse)
    user = torch.nn.Embedding.from_pretrained(initial["user"].clone(), freeze=False, sparse=is_sparse)
    weights = [item.weight, user.weight]
    if kind.startswith("rowwise"):
        optimizer = RowWise(weights, kind)
    else:
        optimizer = {
            "sgd": lambda: torch.optim.SGD(weights, LEARNING_RATE),
            "adagrad": lambda: torch.optim.Adagrad(weights, LEARNING_RATE, eps=1e-8),
            "adam": lambda: torch.optim.SparseAdam(weights, LEARNING_RATE),
        }[kind]()
    losses = []
    for step in range(1, num_steps + 1):
        batch = {name: torch.from_numpy(keys) for name, keys in global_batch(step).items()}
        users = batch["user"] // 2**57 + 20
        item.weight.used = torch.cat([batch["history"].reshape(-1), batch["target"]])
        user.weight.used = users
        loss = sample_loss(item(batch["history"]), item(batch["target"]), user(users))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return {"item": item.weight.detach(), "user": user.weight.detach()}, losses


@pytest.mark.parametrize("num_steps", [12, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_sharded_equals_unsharded_for_every_row_optimizer(pools, kind, num_steps):
    expected, expected_losses = unsharded(kind, num_steps)
    runs = {
        1: [train(Topology.single(), kind, num_steps)],
        2: pools[2].run(train, kind, num_steps),
        4: pools[4].run(train, kind, num_steps),
    }
    for ranks in runs.values():
        for result in ranks:
            for name, vectors in expected.items():
                assert relative(result["vectors"][name], vectors) < 1e-9
            np.testing.assert_allclose(result["losses"], expected_losses, rtol=1e-9)


@pytest.mark.parametrize("world", [2, 4])
def test_sharded_training_repeated_run_is_bitwise(pools, world):
    first, second = (pools[world].run(train, "adam", 20, 3) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert a["digests"] == b["digests"] == first[0]["digests"]
        assert a["losses"] == b["losses"]


def test_sharded_training_float32_close_to_one_rank(pools):
    alone = train(Topology.single(), "rowwise_adagrad", 50, dtype="float32")
    for world in (2, 4):
        result = pools[world].run(train, "rowwise_adagrad", 50, 1, "float32")[0]
        np.testing.assert_allclose(result["losses"], alone["losses"], rtol=1e-4)


@pytest.mark.parametrize("kind", ["rowwise_adagrad", "adam"])
def test_micro_batches_equal_full_batch(pools, kind):
    full_batch = pools[2].run(train, kind, 30, 1)[0]
    micro_batches = pools[2].run(train, kind, 30, 3)[0]
    for name, vectors in full_batch["vectors"].items():
        assert relative(micro_batches["vectors"][name], vectors) < 1e-9


@pytest.mark.parametrize("shares", [[12, 0, 0, 0], [0, 0, 12, 0], [5, 0, 1, 6]])
def test_sharded_training_with_empty_ranks_equals_one_rank(pools, shares):
    expected = train(Topology.single(), "adagrad", 10)
    for result in pools[4].run(train, "adagrad", 10, 2, "float64", "device", "", shares):
        np.testing.assert_allclose(result["losses"], expected["losses"], rtol=1e-9)
        for name, vectors in expected["vectors"].items():
            assert relative(result["vectors"][name], vectors) < 1e-9


@pytest.mark.parametrize("world", [1, 2])
def test_stores_are_bitwise_equal(pools, world, tmp_path):
    def run(store: str) -> dict:
        if world == 1:
            return train(Topology.single(), "adam", 30, 2, store=store, folder=str(tmp_path))
        return pools[world].run(train, "adam", 30, 2, "float64", store, str(tmp_path))[0]

    device, dram, disk = (run(store) for store in ("device", "dram", "disk"))
    assert device["digests"] == dram["digests"] == disk["digests"]
    assert device["losses"] == dram["losses"] == disk["losses"]
    assert not list(tmp_path.iterdir())


def test_sharded_training_issues_collectives_in_one_order(pools):
    issued = [result["issued"] for result in pools[4].run(train, "sgd", 5, 2)]
    assert len(issued[0]) == 5 * (2 + 2 * 2 + 1), "sizes and keys, vectors and gradients of two parts, the loss"
    assert all(other == issued[0] for other in issued)


def test_sharded_training_bytes_sent_match_keys_and_vectors(pools):
    results = pools[2].run(train, "sgd", 5)
    keys, vectors, gradients = (
        sum(getattr(r["sent"], leg).bytes_sent for r in results) for leg in ("keys", "vectors", "gradients")
    )
    assert vectors == gradients > keys > 0
    assert vectors % 24 == 0
    assert keys % 10 == 0, "a key and, in two bytes, whose it is"


def clipped(topology: Topology) -> list[list[float]]:
    """Return the weights after a step with clipping, in which every rank and micro-batch has a part of the gradient."""
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 2, dtype=torch.float64)
    dense = DenseOptimizer(model, OptimizerConfig(max_grad_norm=0.5, eps=1.0), topology, torch.device("cpu"))
    gradients = [
        torch.randn(w.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        for w in model.parameters()
    ]
    for _ in range(2):  # micro-batches
        for weight, gradient in zip(model.parameters(), gradients, strict=True):
            part = gradient / (2 * topology.world)
            weight.grad = part if weight.grad is None else weight.grad + part
    dense.apply(dense.reduce(torch.zeros(()), False), 0.1)
    return [weight.detach().reshape(-1).tolist() for weight in model.parameters()]


def test_gradient_clipping_uses_norm_of_global_batch(pools):
    alone = clipped(Topology.single())
    for weights in pools[2].run(clipped):
        assert [pytest.approx(w, rel=1e-12) for w in alone] == weights
