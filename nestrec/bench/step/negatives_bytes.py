"""Bytes of vectors that ranks look up and send each other for a step, by the type in which negatives cross.

Real ranks on this machine and the engine's own counters; nothing is timed. What negatives cost is the difference to
the same step without them.
"""

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from nestrec.base.random import fold_array
from nestrec.data.samples.negatives import uniform_negatives
from nestrec.distributed import Topology
from nestrec.distributed.local_ranks import run_on_ranks
from nestrec.embedding import EmbeddingEngine, TableConfig

Lookup = Literal["full", "float16", "bfloat16"]
LOOKUPS: tuple[Lookup, ...] = ("full", "float16")


def measure_bytes(
    ranks: int, tokens: int, dim: int, num_items: int, negatives: tuple[int, ...]
) -> Iterator[dict[str, Any]]:
    """Rows for each number of negatives and type; tokens: of a rank."""
    counted = run_on_ranks(ranks, count_all, (tokens, dim, num_items), negatives)
    total = {case: np.sum([rank[case] for rank in counted], axis=0) for case in counted[0]}
    for number in negatives:
        whole = total[number, "full"] - total[0, "full"]
        for lookup in LOOKUPS:
            mine = total[number, lookup] - total[0, lookup]
            yield {
                "variant": "bytes",
                "negatives": number,
                "lookup": lookup,
                "ranks": ranks,
                "items": num_items,
                "dim": dim,
                "tokens": tokens,
                "looked_up_bytes": int(mine[0]),
                "sent_bytes": int(mine[1]),
                "of_full": [round(share, 4) for share in (mine / whole).tolist()],
            }


def count_all(
    topology: Topology, shape: tuple[int, int, int], negatives: tuple[int, ...]
) -> dict[tuple[int, Lookup], tuple[int, int]]:
    """(number of negatives, type) to the bytes of one rank, also without negatives."""
    return {(n, lookup): count_bytes(topology, shape, n, lookup) for n in (0, *negatives) for lookup in LOOKUPS}


def count_bytes(topology: Topology, shape: tuple[int, int, int], negatives: int, lookup: Lookup) -> tuple[int, int]:
    """Bytes of vectors of one step: looked up by this rank's shard, and sent to others."""
    tokens, dim, num_items = shape
    half: dict[str, Any] = {} if lookup == "full" else {"half_features": ("negative",), "half_dtype": lookup}
    features = ("history", "negative")
    table = TableConfig(name="items", dim=dim, num_rows=num_items + 1, features=features, **half)
    engine = EmbeddingEngine([table], topology)
    key_T = fold_array(topology.rank, np.arange(tokens))
    keys = {
        "history": 1 + (fold_array(key_T, key_T) % np.uint64(num_items)).astype(np.int64),
        "negative": uniform_negatives(key_T, negatives, num_items),
    }
    routed = engine.route(keys)
    engine.exchange_vectors(routed, engine.fetch(routed, step=1))
    return engine.statistics.vector_bytes, engine.statistics.vectors.bytes_sent
