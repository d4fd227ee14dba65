"""Rows that are only negatives cross in half precision: what arrives, what it costs, and that it trains the same."""

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
    half: dict[str, Any] = {} if lookup == "full" else {"half_features": ("negative",), "half_dtype": lookup}
    return TableConfig(name="items", dim=DIM, num_rows=NUM_ROWS, features=("history", "negative"), seed=3, **half)


def batch(rank: int) -> list[dict[str, np.ndarray]]:
    """Two parts; the second reads as history what the first has as negatives. A rank may have none."""
    draw = np.random.default_rng(rank)
    if rank == 2:
        return [{"history": np.empty(0, np.int64), "negative": np.empty((0, 4), np.int64)}] * 2
    low, high = 100 * (rank % 2), 100 * (rank % 2) + 150
    history = [draw.integers(low, low + 40, 12), draw.integers(low, low + 60, 12)]
    return [{"history": h, "negative": draw.integers(low, high, (12, 4))} for h in history]


def exchanged(topology: Topology, lookup: str, window_cache: bool) -> tuple[list[dict[int, list[float]]], int, int]:
    """Of each part the vectors by key, and the engine's bytes looked up and sent."""
    engine = EmbeddingEngine([table(lookup)], topology)
    parts = batch(topology.rank)
    routed = engine.route(*parts, window_cache=window_cache)
    working = engine.fetch(routed, step=1)
    window = ExchangeWindow(engine, routed, working)
    found = []
    for number, part in enumerate(routed.micro_batches):
        window.receive(number)
        vectors = window.vectors(number)["items"]
        looked_up = {f: vectors[index.reshape(-1).long()].tolist() for f, index in part.index.items()}
        by_key = [dict(zip(parts[number][f].reshape(-1).tolist(), looked_up[f], strict=True)) for f in looked_up]
        found.append(by_key[0] | by_key[1])
        window.keep(number, {"items": torch.ones(len(vectors), DIM)})
        window.send(number)
    gradients = working.tables["items"].gradient
    assert gradients is None or gradients.dtype == torch.float32
    return found, engine.statistics.vector_bytes, engine.statistics.vectors.bytes_sent


@pytest.mark.parametrize("window_cache", [False, True])
@pytest.mark.parametrize("lookup", ["float16", "bfloat16"])
@pytest.mark.parametrize("world", [1, 4])
def test_only_rows_that_are_nothing_but_negatives_are_rounded(pools, world, lookup, window_cache):
    run = pools[world].run
    whole, half = run(exchanged, "full", window_cache), run(exchanged, lookup, window_cache)
    for rank in range(world):
        parts = batch(rank)
        everywhere = {key for part in parts for key in part["history"].tolist()}
        for number, (expected, found) in enumerate(zip(whole[rank][0], half[rank][0], strict=True)):
            read_whole = everywhere if window_cache else set(parts[number]["history"].tolist())
            assert expected.keys() == found.keys()
            for key, vector in expected.items():
                rounded = torch.tensor(vector).to(getattr(torch, lookup)).tolist()
                assert found[key] == (vector if key in read_whole else rounded)


def test_bytes_of_rows_that_are_only_negatives_are_halved(pools):
    whole, half = (pools[4].run(exchanged, lookup, False) for lookup in ("full", "float16"))
    only_negatives = 0
    for rank in range(4):
        for part in batch(rank):
            only_negatives += len(set(part["negative"].reshape(-1).tolist()) - set(part["history"].tolist()))
    looked_up, sent = ([sum(rank[i] for rank in found) for found in (whole, half)] for i in (1, 2))
    assert looked_up[0] - looked_up[1] == only_negatives * DIM * 2
    assert 0 < sent[0] - sent[1] < looked_up[0] - looked_up[1]


def test_features_in_half_precision_must_come_last():
    config = TableConfig(name="items", dim=4, features=("negative", "history"), half_features=("negative",))
    with pytest.raises(UserError, match="must be the last"):
        EmbeddingEngine([config], Topology.single())
