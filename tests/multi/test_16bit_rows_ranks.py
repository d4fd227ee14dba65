"""Rows that are used only as negatives are sent in half precision: their values and the number of bytes."""

from typing import Any

import numpy as np
import pytest
import torch

from nestrec.base.errors import UserError
from nestrec.distributed import Topology
from nestrec.embedding import EmbeddingEngine, TableConfig
from nestrec.pipeline.exchange_window import ExchangeWindow

DIM, NUM_ROWS = 10, 300


def table(lookup: str) -> TableConfig:
    half: dict[str, Any] = {} if lookup == "full" else {"half_precision_features": ("negative",), "half_dtype": lookup}
    return TableConfig(name="items", dim=DIM, num_rows=NUM_ROWS, features=("history", "negative"), seed=3, **half)


def batch(rank: int) -> list[dict[str, np.ndarray]]:
    """Return two micro-batches of a rank; rank 2 has no samples.

    The history of the second micro-batch contains negatives of the first.
    """
    draw = np.random.default_rng(rank)
    if rank == 2:
        return [{"history": np.empty(0, np.int64), "negative": np.empty((0, 4), np.int64)}] * 2
    low, high = 100 * (rank % 2), 100 * (rank % 2) + 150
    history = [draw.integers(low, low + 40, 12), draw.integers(low, low + 60, 12)]
    return [{"history": h, "negative": draw.integers(low, high, (12, 4))} for h in history]


def exchange(topology: Topology, lookup: str, window_cache: bool) -> tuple[list[dict[int, list[float]]], int, int]:
    """Return the vectors of each micro-batch by key, and the bytes of vectors that were looked up and sent."""
    engine = EmbeddingEngine([table(lookup)], topology)
    parts = batch(topology.rank)
    routed = engine.route(*parts, window_cache=window_cache)
    working = engine.fetch_rows(routed, step=1)
    window = ExchangeWindow(engine, routed, working)
    vectors_by_key = []
    for number, part in enumerate(routed.micro_batches):
        window.receive(number)
        vectors = window.vectors(number)["items"]
        looked_up = {f: vectors[index.reshape(-1).long()].tolist() for f, index in part.index.items()}
        by_key = [dict(zip(parts[number][f].reshape(-1).tolist(), looked_up[f], strict=True)) for f in looked_up]
        vectors_by_key.append(by_key[0] | by_key[1])
        window.store_gradients(number, {"items": torch.ones(len(vectors), DIM)})
        window.send(number)
    gradients = working.tables["items"].gradient
    assert gradients is None or gradients.dtype == torch.float32
    return vectors_by_key, engine.statistics.vector_bytes, engine.statistics.vectors.bytes_sent


@pytest.mark.parametrize("window_cache", [False, True])
@pytest.mark.parametrize("lookup", ["float16", "bfloat16"])
@pytest.mark.parametrize("world", [1, 4])
def test_half_precision_rounds_only_negatives(pools, world, lookup, window_cache):
    run = pools[world].run
    full = run(exchange, "full", window_cache)
    half = run(exchange, lookup, window_cache)
    for rank in range(world):
        parts = batch(rank)
        all_history = {key for part in parts for key in part["history"].tolist()}
        for number, (expected, actual) in enumerate(zip(full[rank][0], half[rank][0], strict=True)):
            full_precision = all_history if window_cache else set(parts[number]["history"].tolist())
            assert expected.keys() == actual.keys()
            for key, vector in expected.items():
                rounded = torch.tensor(vector).to(getattr(torch, lookup)).tolist()
                assert actual[key] == (vector if key in full_precision else rounded)


def test_half_precision_halves_bytes_of_negatives(pools):
    full, half = (pools[4].run(exchange, lookup, False) for lookup in ("full", "float16"))
    only_negatives = 0
    for rank in range(4):
        for part in batch(rank):
            only_negatives += len(set(part["negative"].reshape(-1).tolist()) - set(part["history"].tolist()))
    looked_up, sent = ([sum(rank[i] for rank in ranks) for ranks in (full, half)] for i in (1, 2))
    assert looked_up[0] - looked_up[1] == only_negatives * DIM * 2
    assert 0 < sent[0] - sent[1] < looked_up[0] - looked_up[1]


def test_half_precision_features_must_come_last():
    config = TableConfig(name="items", dim=4, features=("negative", "history"), half_precision_features=("negative",))
    with pytest.raises(UserError, match="must be the last"):
        EmbeddingEngine([config], Topology.single())
