"""Batches over pages equal batches sequence by sequence: on a GPU, or in Triton's interpreter."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from nestrec.models import FuXiConfig, HSTUConfig, SASRecConfig
from nestrec.models.backbone_spec import AttentionSpanConfig
from nestrec.ops.kernel_op import IS_INTERPRETED
from nestrec.serving.engine.reference_runner import BatchItem, ReferenceRunner, found_by_states
from nestrec.serving.kv_cache.kv_page_pool import PagePool
from nestrec.serving.model.model_adapter import make_form
from nestrec.serving.model.request_inputs import Candidates, History, number_bits
from nestrec.serving.model.row_sources import DramRows
from nestrec.serving.model.served_tables import CachedTable
from nestrec_bench.harness.random_model import random_ranking, random_retrieval
from support.random_models import with_users_before

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),  # rows of padding hold anything
    pytest.mark.skipif(not IS_INTERPRETED, reason="needs TRITON_INTERPRET=1"),
]
SHAPES = [(0, 40, 3), (128, 150, 5), (20, 20, 0), (0, 130, 0), (64, 64, 7)]
"""(first, end, candidates) in tokens"""


def make_parts(form, rng, shapes):
    parts = []
    page = 0
    before = len(form.servable.prefix_columns)
    of_user = {
        field: 1 + place % 2 if column.has_table else int(number_bits(rng.normal(size=1).astype(np.float32))[0])
        for column in form.servable.prefix_columns
        for place, field in enumerate(column.fields)
    }
    for first, end, asked in shapes:
        count = (end - before) // form.tokens_an_event
        history = History(
            items=rng.integers(1, 100, count),
            times_ms=np.sort(rng.integers(0, 10**10, count)),
            actions=rng.integers(0, 4, count),
            features={"event_tab": rng.integers(0, 3, count)} | {n: np.full(count, v) for n, v in of_user.items()},
        )
        candidates = Candidates(
            items=rng.integers(1, 100, asked),
            now_ms=2 * 10**10,
            features={"event_tab": rng.integers(0, 3, asked)} | {n: np.full(asked, v) for n, v in of_user.items()},
        )
        pages = list(range(page, page + -(-end // 64)))[::-1]
        page += len(pages)
        part = BatchItem(
            tokens=form.tokens(history, candidates.now_ms),
            first=first,
            end=end,
            pages=pages,
            store_until=end,
            candidates=candidates if asked else None,
        )
        parts.append(replace(part, store_until=min(end, part.tokens.num_cacheable)))
    return parts, page


FEW = [(0, 40, 3), (128, 150, 5), (64, 64, 2)]
SIGNALS = [(0, 130, 0), (64, 100, 0)]
ASKED = [(0, 40, 3), (128, 150, 5), (0, 20, 0), (63, 64, 7)]
"""of retrieval: the last event of who asks is new"""
SIZES = {"dim": 32, "num_layers": 2, "num_heads": 2, "max_length": 402}
TIMES = {"time_bias": True}
ENCODERS = {
    "plain": HSTUConfig(**SIZES, head_dim=16, position_bias=False),
    "local": HSTUConfig(**SIZES, head_dim=16, position_bias=False, attention=AttentionSpanConfig(window=30, prefix=70)),
    "tables": HSTUConfig(**SIZES, head_dim=12, **TIMES),
    "function": HSTUConfig(**SIZES, head_dim=16, **TIMES, time_encoding="functional"),
    "layers differ": HSTUConfig(
        **SIZES | {"num_layers": 4},
        head_dim=16,
        attention=AttentionSpanConfig(window=40, full_layers=1, keep_last=50, keep_from=3),
    ),
    "fuxi": FuXiConfig(**SIZES, head_dim=16, ffn_dim=24),
    "sasrec": SASRecConfig(**SIZES, ffn_dim=24),
}


RARE = ("plain", "function")
"""of which other tests know much"""


def run_both(make_model, encoder, shapes, num_candidates, *, is_cached=False, prefix_dtype="model", is_searched=False):
    """(scores or states, pool) sequence by sequence and over pages. is_searched: the pass ends with what was found."""
    from nestrec.base.lazy import import_attribute
    from nestrec.serving.engine.batch_layout import BatchBuffer, Extent, RequestRows, Sections, lay_out
    from nestrec.serving.engine.graph_runner import (
        CapturedGraph,
        GraphBest,
        are_found_inside,
        found_of,
        layout_of,
        room_for_content,
        write_pairs,
    )

    servable = make_model(encoder, num_items=100)
    if is_cached:
        rows = DramRows(servable.tables["items"].weight)
        servable = replace(servable, tables={**servable.tables, "items": CachedTable(rows, torch.device("cpu"), 9)})
    form = make_form(servable)
    parts, num_pages = make_parts(form, np.random.default_rng(1), shapes)
    if is_searched:
        parts = [asking_for_the_best(part, 7 + number) for number, part in enumerate(parts)]
        assert are_found_inside(parts)
    pools = [
        PagePool(
            servable.kept,
            num_pages=num_pages,
            page_tokens=64,
            device=torch.device("cpu"),
            dtype=torch.float32,
            prefix_dtype=prefix_dtype,
            has_times=servable.reads_times,
        )
        for _ in range(2)
    ]
    generator = torch.Generator().manual_seed(1)
    filled = torch.randn(pools[0].tensor.shape, generator=generator)
    for pool in pools:
        fill(pool, filled)
    for part in parts:
        if servable.reads_times and part.first:
            slots = torch.from_numpy(pools[1].slots(part.pages, 0, part.first))
            pools[1].kept_pages.times[slots] = part.tokens.time_T[: part.first]
    expected = ReferenceRunner(form, pools[0]).run(parts)
    encoder = import_attribute(servable.cached.paged)(form.encoder, pools[1].kept_pages)
    rows = RequestRows.of(form, parts)
    extent = Extent.of(rows, pools[1].page_tokens)
    room = BatchBuffer(512, num_candidates, 16, layout_of(form, encoder), 256 if is_searched else 0)
    best = GraphBest(form) if is_searched else None
    captured = CapturedGraph(form, encoder, room, room_for_content(form, room.num_records), best)
    assert room.holds(extent)
    packed = torch.full((room.num_indices,), 10**6, dtype=torch.int32)  # of a batch before: nothing of it may be read
    sections = Sections(room, packed.numpy())
    with torch.inference_mode():
        lay_out(pools[1], rows, sections)
        captured.bring(sections, extent.num_records)
        asking = [part for part in parts if part.candidates is not None]
        if is_searched:
            write_pairs([part.candidates for part in asking], sections.pairs_2P)
        found = captured.run(packed)[: extent.num_candidates]
        if is_searched:
            return found_of(parts, found), expected, pools, parts
        if not form.appends_candidates:
            found = found_by_states(form, asking, list(found))
            found = torch.cat([torch.from_numpy(one.scores) for one in found])
    wanted = np.concatenate([np.zeros((0, len(form.outputs))), *(s.scores for s in expected if s is not None)])
    return found.numpy(), wanted, pools, parts


BEFORE = [(0, 41, 3), (2, 43, 0), (129, 151, 5), (65, 65, 2)]
"""of which histories hold three tokens less, some of them computed before"""


@pytest.mark.parametrize(
    ("make_model", "kind", "shapes"),
    [
        (random_ranking, "tables", BEFORE),
        pytest.param(random_ranking, "local", BEFORE, marks=pytest.mark.slow),
        pytest.param(random_ranking, "layers differ", BEFORE, marks=pytest.mark.slow),
        pytest.param(random_ranking, "sasrec", BEFORE, marks=pytest.mark.slow),
        pytest.param(random_retrieval, "tables", ASKED, marks=pytest.mark.slow),
    ],
)
def test_tokens_of_users_before_a_history_and_interactions_are_the_same_over_pages(make_model, kind, shapes):
    found, wanted, pools, parts = run_both(with_users_before(make_model), ENCODERS[kind], shapes, 64)
    assert np.abs(found - wanted).max() <= 1e-5
    if kind != "layers differ":
        torch.testing.assert_close(pools[1].tensor, pools[0].tensor, rtol=1e-4, atol=1e-5)
    assert all(len(part.tokens.before) == 3 for part in parts)


def asking_for_the_best(part, count):
    """Instead of scores: so many, without those of the history; signals ask for nothing."""
    if part.candidates is None:
        return part
    seen = np.unique(part.tokens.columns[0])
    none = np.zeros(0, np.int64)
    return replace(part, candidates=replace(part.candidates, items=none, num_best=count, excluded=seen))


def fill(pool, values):
    """Prefixes that nobody computed."""
    for layer in range(len(values)):
        pages = list(range(pool.num_pages))
        pool.write(layer, pages, 0, values[layer, 0].transpose(0, 1), values[layer, 1].transpose(0, 1))


@pytest.mark.parametrize(
    ("kind", "is_cached", "shapes", "num_candidates"),
    [
        *(
            pytest.param(kind, kind == "local", FEW, 512, marks=[pytest.mark.slow] if kind in RARE else [])
            for kind in ENCODERS
        ),
        pytest.param("plain", False, SHAPES, 512, marks=pytest.mark.slow),
        ("plain", False, SHAPES, 15),
        ("tables", False, SIGNALS, 0),
    ],
)
def test_a_batch_over_pages_has_the_scores_and_keeps_the_prefixes_of_one_sequence_by_sequence(
    kind, is_cached, shapes, num_candidates
):
    found, wanted, pools, parts = run_both(random_ranking, ENCODERS[kind], shapes, num_candidates, is_cached=is_cached)
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max(initial=0.0) <= 1e-5
    if kind != "layers differ":  # behind a cut nothing reads what is kept of what stands before it
        torch.testing.assert_close(pools[1].tensor, pools[0].tensor, rtol=1e-4, atol=1e-5)
    for part in parts:
        if pools[1].kept_pages.times is not None:
            kept = pools[1].kept_pages.times[torch.from_numpy(pools[1].slots(part.pages, 0, part.end))]
            assert torch.equal(kept, part.tokens.time_T[: part.end])


@pytest.mark.parametrize("kind", ["tables", pytest.param("fuxi", marks=pytest.mark.slow), "sasrec"])
def test_a_retrieval_batch_over_pages_searches_with_the_states_of_last_events(kind):
    found, wanted, _, _ = run_both(random_retrieval, ENCODERS[kind], ASKED, 64)
    assert np.abs(found - wanted).max() <= 1e-4


def test_a_pass_from_ids_to_items_finds_what_a_search_after_it_finds():
    found, wanted, _, parts = run_both(random_retrieval, ENCODERS["plain"], ASKED, 16, is_searched=True)
    for one, other, part in zip(found, wanted, parts, strict=True):
        assert (one is None) == (other is None) == (part.candidates is None)
        if one is not None:
            assert len(one.items) == part.candidates.num_best
            assert not np.isin(one.items, part.candidates.excluded).any()
            np.testing.assert_array_equal(one.items, other.items)
            np.testing.assert_allclose(one.scores, other.scores, atol=1e-4)


def test_prefixes_of_8_bits_are_the_same_to_both():
    found, wanted, pools, _ = run_both(random_ranking, ENCODERS["tables"], FEW, 512, prefix_dtype="fp8")
    assert np.abs(found - wanted).max() <= 1e-5
    assert (pools[0].tensor.view(torch.uint8) != pools[1].tensor.view(torch.uint8)).float().mean() < 1e-3
