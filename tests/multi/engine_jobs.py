"""Jobs that ranks run in the tests of the engine."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nestrec.base.errors import UserError
from nestrec.distributed import GradientReducer, Topology
from nestrec.distributed.collectives import all_reduce_sum, assert_same_on_all_ranks, raise_on_all_ranks
from nestrec.distributed.topology import ParallelConfig
from nestrec.embedding import EmbeddingEngine, RowOptimizerConfig, StoreConfig, TableConfig
from nestrec.jagged import Jagged
from nestrec.ops.embedding.row_gather import gather_rows

NUM_ROWS, NUM_SAMPLES, LENGTH = 60, 12, 4
LEARNING_RATE = 0.05


def tables(kind: str, dtype: str = "float64", store: str = "device", folder: str = "") -> list[TableConfig]:
    """Return a static table that is read by two features, and a dynamic table."""
    optimizer = RowOptimizerConfig(kind=kind)  # type: ignore[arg-type]
    store_config = StoreConfig(kind=store, folder=folder, cache_rows=16)  # type: ignore[arg-type]
    common: dict[str, Any] = {"dtype": dtype, "optimizer": optimizer, "store": store_config}
    return [
        TableConfig(name="item", dim=6, num_rows=NUM_ROWS, features=("history", "target"), seed=1, **common),
        TableConfig(name="user", dim=3, seed=2, **common),
    ]


def global_batch(step: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(step)
    history = np.minimum(draw.zipf(1.3, (NUM_SAMPLES, LENGTH)), NUM_ROWS) - 1
    return {
        "history": history,
        "target": draw.integers(0, NUM_ROWS, NUM_SAMPLES),
        "user": draw.integers(-20, 20, NUM_SAMPLES) * 2**57,
    }


def sample_loss(history: torch.Tensor, target: torch.Tensor, user: torch.Tensor) -> torch.Tensor:
    """Return the sum of the losses of samples; it is not linear, so that errors grow."""
    score = (history.mean(1) * target).sum(1) + user.sin().sum(1)
    return (score.sin() + (history**2).sum((1, 2)) * 0.1).sum() / NUM_SAMPLES


def share(
    batch: dict[str, np.ndarray], rank: int, world: int, num_micro_batches: int, shares: list[int] | None = None
) -> list[dict]:
    """Return the samples of a rank in micro-batches; `shares` is the number of samples per rank if it is not even."""
    counts = shares or [NUM_SAMPLES * (r + 1) // world - NUM_SAMPLES * r // world for r in range(world)]
    start = sum(counts[:rank])
    samples = np.arange(start, start + counts[rank])
    return [{name: keys[part] for name, keys in batch.items()} for part in np.array_split(samples, num_micro_batches)]


def train_step(engine: EmbeddingEngine, parts: list[dict], step: int) -> torch.Tensor:
    """Run one serial step over the micro-batches of a rank and return the loss of the global batch."""
    routed = engine.route(*parts)
    working = engine.fetch_rows(routed, step=step)
    total = torch.zeros((), dtype=torch.float64)
    for number, part in enumerate(routed.micro_batches):
        vectors = {n: v.clone().requires_grad_() for n, v in engine.exchange_vectors(routed, working, number).items()}
        item = vectors["item"]
        looked_up = (
            gather_rows(item, part.index["history"]),
            gather_rows(item, part.index["target"]),
            gather_rows(vectors["user"], part.index["user"]),
        )
        loss = sample_loss(*looked_up)
        loss.backward()
        engine.accumulate(routed, working, {n: v.grad for n, v in vectors.items()}, number)
        total += loss.detach().double()
    engine.update(working, learning_rate=LEARNING_RATE)
    engine.write_back(working)
    all_reduce_sum(engine.topology.dense, total)
    return total


def all_vectors(engine: EmbeddingEngine) -> dict[str, torch.Tensor]:
    """Return the vectors of all keys that training can have used, on every rank."""
    all_keys = {"history": np.arange(NUM_ROWS), "target": np.empty(0, np.int64), "user": np.arange(-20, 20) * 2**57}
    vectors = engine.lookup_readonly(all_keys)
    return {"item": vectors["history"], "user": vectors["user"]}


def train(  # noqa: PLR0917
    topology: Topology,
    kind: str,
    num_steps: int,
    num_micro_batches: int = 1,
    dtype: str = "float64",
    store: str = "device",
    folder: str = "",
    shares: list[int] | None = None,
) -> dict[str, Any]:
    engine = EmbeddingEngine(tables(kind, dtype, store, folder), topology)
    start = topology.log.count
    losses = []
    for step in range(1, num_steps + 1):
        parts = share(global_batch(step), topology.rank, topology.world, num_micro_batches, shares)
        losses.append(float(train_step(engine, parts, step)))
    issued = topology.log.entries()[-(topology.log.count - start) :] if topology.world > 1 else []
    result = {
        "vectors": all_vectors(engine),
        "digests": [engine.digest(name) for name in engine.tables],
        "losses": losses,
        "issued": issued,
        "sent": engine.statistics,
        "host_bytes": [s.store.statistics()["host_bytes"] for s in engine.shards.values()],
    }
    engine.close()
    return result


def save(topology: Topology, folder: str) -> list[str]:
    """Train for a few steps and write this rank's shard to a file."""
    engine = EmbeddingEngine(tables("adam"), topology)
    for step in range(1, 6):
        train_step(engine, share(global_batch(step), topology.rank, topology.world, 1), step)
    _write(engine, folder)
    return [engine.digest(name) for name in engine.tables]


def load(topology: Topology, source: str, target: str | None) -> tuple[list[str], list[float], list[int]]:
    """Load shards that any number of ranks wrote; return digests, losses of two more steps and numbers of rows."""
    engine = EmbeddingEngine(tables("adam"), topology)
    num_loaded = []
    for name in engine.tables:
        files = sorted(Path(source).glob(f"{name}.*.pt"))
        chunks = (chunk for file in files for chunk in torch.load(file, weights_only=True))
        num_loaded.append(engine.load(name, chunks))
    if target is not None:
        _write(engine, target)
    digests = [engine.digest(name) for name in engine.tables]
    losses = [
        float(train_step(engine, share(global_batch(step), topology.rank, topology.world, 1), step)) for step in (6, 7)
    ]
    return digests, losses, num_loaded


def _write(engine: EmbeddingEngine, folder: str) -> None:
    Path(folder).mkdir(exist_ok=True, parents=True)
    for name in engine.tables:
        torch.save(list(engine.snapshot(name)), Path(folder) / f"{name}.{engine.topology.rank}.pt")


def route_round_trip(topology: Topology, keys_of_ranks: list[list[list[int]]], num_micro_batches: int) -> int:
    """Look up the keys of every rank, and check the vectors and the sums of gradients, which are counts of keys.

    Returns:
        The number of keys that this rank owns.
    """
    table = TableConfig(name="t", dim=2, dtype="float64", seed=9)
    alone = EmbeddingEngine([table], Topology.single())
    engine = EmbeddingEngine([table], topology)
    micro_batches = [np.array(k, np.int64) for k in keys_of_ranks[topology.rank]]
    routed = engine.route(*[{"t": keys} for keys in micro_batches])
    working = engine.fetch_rows(routed, step=1)
    for number, keys in enumerate(micro_batches):
        index = routed.micro_batches[number].index["t"]
        vectors = engine.exchange_vectors(routed, working, number)["t"]
        assert torch.equal(gather_rows(vectors, index), alone.lookup_readonly({"t": keys})["t"])
        counts = torch.bincount(index, minlength=len(vectors)).double()
        engine.accumulate(routed, working, {"t": counts[:, None].expand(-1, 2).contiguous()}, number)
    owned = routed.owned["t"]
    assert len(set(owned.tolist())) == len(owned)
    all_keys = [key for rank in keys_of_ranks for part in rank for key in part]
    gradient = working.tables["t"].gradient
    for index, key in enumerate(owned.tolist()):
        assert gradient is not None
        assert gradient[index].tolist() == [all_keys.count(key)] * 2
    return len(owned)


def top_k(topology: Topology, with_exclusion: bool) -> tuple[torch.Tensor, torch.Tensor]:
    engine = EmbeddingEngine(tables("sgd", "float32"), topology)
    for step in range(1, 4):
        train_step(engine, share(global_batch(step), topology.rank, topology.world, 1), step)
    draw = torch.Generator().manual_seed(3)
    queries = torch.randn(9, 6, generator=draw)
    queries[4] = 0  # all scores tie
    seen = [torch.randint(0, NUM_ROWS, (n % 4 * 20,), generator=draw) for n in range(9)]
    local_slice = slice(9 * topology.rank // topology.world, 9 * (topology.rank + 1) // topology.world)
    exclude = Jagged.from_rows([torch.empty(0, dtype=torch.int64), *seen[local_slice]]) if with_exclusion else None
    if exclude is not None:
        exclude = Jagged(exclude.values, exclude.offsets[1:])
    before = engine.digest("item"), engine.shards["item"].key_index.num_rows
    result = engine.top_k("item", queries[local_slice], 7, exclude=exclude, candidates=range(1, NUM_ROWS))
    assert before == (engine.digest("item"), engine.shards["item"].key_index.num_rows)
    return result


def top_k_of_hashed(topology: Topology, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return scores and ids of the top 5 for one query, and the scores of all ids computed from looked-up vectors."""
    engine = EmbeddingEngine([TableConfig(name="t", dim=3, num_rows=num_rows, is_hashed=True)], topology)
    query = torch.tensor([[1.0, -2.0, 0.5]])
    scores, ids = engine.top_k("t", query, 5, candidates=np.arange(1, 40))
    vectors = engine.lookup_readonly({"t": np.arange(1, 40)})["t"]
    return scores[0], ids[0], (vectors.double() @ query[0].double()).float()


def other_config_on_last_rank(topology: Topology) -> None:
    config = tables("sgd" if topology.rank + 1 < topology.world else "adam")
    EmbeddingEngine(config, topology)


def bad_key_on_last_rank(topology: Topology) -> None:
    engine = EmbeddingEngine(tables("sgd"), topology)
    [part] = share(global_batch(1), topology.rank, topology.world, 1)
    if topology.rank + 1 == topology.world:
        part["target"] = part["target"] + NUM_ROWS
    engine.route(part)


def die_in_step(topology: Topology) -> None:
    engine = EmbeddingEngine(tables("sgd"), topology)
    [part] = share(global_batch(1), topology.rank, topology.world, 1)
    routed = engine.route(part)
    working = engine.fetch_rows(routed, step=1)
    if topology.rank == 1:
        os._exit(9)
    for _ in range(3):
        engine.exchange_vectors(routed, working)


def error_on_rank_1(topology: Topology) -> None:
    error = UserError("is full", option="disk", value="/data", remedy="free space") if topology.rank == 1 else None
    raise_on_all_ranks(topology.control, error)


def different_values(topology: Topology) -> None:
    assert_same_on_all_ranks(topology.control, "seed", {"seed": topology.rank // 2})


def dense_sums(topology: Topology) -> tuple[list[torch.Tensor], list[str]]:
    layers = torch.nn.ParameterList([torch.nn.Parameter(torch.full((n,), 1.0 + topology.rank)) for n in (3, 5, 2)])
    sync = GradientReducer(layers, topology.dense, bucket_bytes=16)
    sync.broadcast_parameters()
    assert all((p == 1).all() for p in layers)
    for number, parameter in enumerate(layers):
        if not (topology.rank == 1 and number == 2):
            parameter.grad = torch.full_like(parameter, 10.0**topology.rank)
    start = topology.log.count
    sync.reduce()
    return [p.grad for p in layers], topology.log.entries()[-(topology.log.count - start) :]


def mesh(topology: Topology) -> dict[str, Any]:
    """Return sums of rank + 1 over each axis, and the number of slots of a static table in the replica group."""
    sums = {}
    for communicator in (topology.keys, topology.replicas, topology.dense):
        total = torch.tensor([topology.rank + 1])
        all_reduce_sum(communicator, total)
        sums[communicator.name] = int(total)
    table = TableConfig(name="t", dim=2, num_rows=30)
    slots = torch.tensor([EmbeddingEngine([table], topology).shards["t"].key_index.num_slots])
    all_reduce_sum(topology.keys, slots)
    return {"replica": topology.replica, "shard": topology.shard, **sums, "slots": int(slots)}


def create_topology(topology: Topology, ranks: ParallelConfig) -> None:
    Topology.of_process_group(torch.device("cpu"), ranks)
