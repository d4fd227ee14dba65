"""Batches over pages equal batches sequence by sequence: on a GPU, or in Triton's interpreter."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from nestrec.models.hstu import HSTUConfig
from nestrec.models.reach import FULL, AttentionReach
from nestrec.ops.registry import IS_INTERPRETED
from nestrec.serving.engine.runner import Part, Runner
from nestrec.serving.model.forms import make_form
from nestrec.serving.model.inputs import Candidates, History
from nestrec.serving.model.random_model import random_ranking
from nestrec.serving.model.row_sources import DramRows
from nestrec.serving.model.tables import CachedTable
from nestrec.serving.prefix.page_pool import PagePool

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),  # rows of padding hold anything
    pytest.mark.skipif(not IS_INTERPRETED, reason="needs TRITON_INTERPRET=1"),
]
ENCODER = HSTUConfig(dim=32, num_layers=2, num_heads=2, head_dim=16, max_length=402, position_bias=False)
SHAPES = [(0, 40, 3), (128, 150, 5), (20, 20, 0), (0, 130, 0), (64, 64, 7)]
"""(first, end, candidates) in tokens"""


def make_parts(form, rng, shapes):
    parts, page = [], 0
    for first, end, asked in shapes:
        count = end // 2
        history = History(
            items=rng.integers(1, 100, count),
            times_ms=np.zeros(count, np.int64),
            actions=rng.integers(0, 4, count),
            features={"event_tab": rng.integers(0, 3, count)},
        )
        candidates = Candidates(
            items=rng.integers(1, 100, asked), now_ms=0, features={"event_tab": rng.integers(0, 3, asked)}
        )
        pages = list(range(page, page + -(-end // 64)))[::-1]
        page += len(pages)
        parts.append(
            Part(
                tokens=form.tokens(history, 0),
                first=first,
                end=end,
                pages=pages,
                store_until=end,
                candidates=candidates if asked else None,
            )
        )
    return parts, page


SIGNALS = [(0, 130, 0), (64, 100, 0)]


@pytest.mark.parametrize(
    ("is_cached", "shapes", "num_candidates", "reach"),
    [
        (False, SHAPES, 512, FULL),
        (True, SHAPES, 512, AttentionReach(window=30, prefix=70)),
        (False, SHAPES, 15, FULL),
        (False, SIGNALS, 0, FULL),
    ],
)
def test_a_batch_over_pages_has_the_scores_and_keeps_the_prefixes_of_one_sequence_by_sequence(
    is_cached, shapes, num_candidates, reach
):
    from nestrec.models.hstu_cached import is_pageable
    from nestrec.models.hstu_paged import PagedHSTU
    from nestrec.serving.engine.batch_layout import Extent, Room, Sections, lay_out
    from nestrec.serving.engine.graph_runner import Captured, room_for_content

    servable = random_ranking(replace(ENCODER, attention=reach), num_items=100)
    if is_cached:
        rows = DramRows(servable.tables["items"].weight)
        servable = replace(servable, tables={**servable.tables, "items": CachedTable(rows, torch.device("cpu"), 9)})
    form = make_form(servable)
    assert is_pageable(form.encoder)
    parts, num_pages = make_parts(form, np.random.default_rng(1), shapes)
    pools = [
        PagePool(ENCODER, num_pages=num_pages, page_tokens=64, device=torch.device("cpu"), dtype=torch.float32)
        for _ in range(2)
    ]
    filled = torch.randn(pools[0].tensor.shape, generator=torch.Generator().manual_seed(1))
    for pool in pools:
        pool.tensor.copy_(filled)
    expected = Runner(form, pools[0]).run(parts)
    extent = Extent.of(parts, pools[1].page_tokens)
    room = Room(num_rows=512, num_candidates=num_candidates, num_pages=16, num_fields=form.num_fields)
    encoder = PagedHSTU(form.encoder, pools[1].tensor, pools[1].page_tokens)
    captured = Captured(form, encoder, room, room_for_content(form, room.num_records))
    assert room.holds(extent)
    packed = torch.full((room.num_indices,), 10**6, dtype=torch.int32)  # of a batch before: nothing of it may be read
    sections = Sections(room, packed.numpy())
    with torch.inference_mode():
        lay_out(form, pools[1], parts, sections)
        captured.bring(sections, extent.num_records)
        scores = captured.run(packed)[: extent.num_candidates]
    wanted = np.concatenate([np.zeros((0, len(form.outputs))), *(s.scores for s in expected if s is not None)])
    assert scores.shape == wanted.shape
    assert np.abs(scores.numpy() - wanted).max(initial=0.0) <= 1e-5
    torch.testing.assert_close(pools[1].tensor, pools[0].tensor, rtol=1e-4, atol=1e-5)
