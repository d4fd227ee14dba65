"""The rank of every event of a window in the whole catalogue: one pass of the model over a slice asks for all of it."""

import numpy as np
from numpy.typing import NDArray

from nestrec.data.samples.slice_samples import RetrievalSlices
from nestrec.embedding import EmbeddingEngine
from nestrec.tasks.catalogue_ranks import RetrievalEvaluationConfig
from nestrec.tasks.item_side import ItemSide
from nestrec.tasks.task import share_of_ranks, sum_over_ranks


def ranks_of_slices(
    side: ItemSide, engine: EmbeddingEngine, slices: RetrievalSlices, cfg: RetrievalEvaluationConfig
) -> NDArray[np.int64]:
    """1-based rank of each scored event, in the order of the slices; 0 beyond the largest k. Collective."""
    num_scored = slices.weights.astype(np.int64)
    place_of = np.concatenate([[0], np.cumsum(num_scored)])
    ranks = np.zeros(int(place_of[-1]), np.int64)
    batch_slices = max(1, cfg.batch_users // max(1, int(num_scored.mean() if len(num_scored) else 1)))
    topology, compared = engine.topology, side.compared(engine)
    for chosen in share_of_ranks(np.arange(len(num_scored)), batch_slices, topology.rank, topology.world):
        rows = slices.read(chosen)
        batch, _ = slices.queries(chosen, rows)
        states = side.states(engine, batch)[batch.tensors["scored"].to(engine.device)]
        barred = cfg.filter_seen != "none"
        _, keys = engine.top_k(
            "items",
            states,
            max(cfg.ks),
            exclude=slices.before_targets(chosen, rows, of_input=cfg.filter_seen == "input") if barred else None,
            row_transform=compared,
            candidates=np.arange(1, side.num_items + 1),
            needs_rows=False,
        )
        hit = keys.cpu() == batch.tensors["target"][:, None]
        place = np.concatenate([np.arange(place_of[c], place_of[c + 1]) for c in chosen] or [ranks[:0]])
        ranks[place] = np.where(hit.any(1), hit.int().argmax(1) + 1, 0)
    return sum_over_ranks(topology, ranks)
