"""Batches over the paged KV cache equal the reference runner, in Triton's interpreter."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from nestrec.models import FuXiConfig, HSTUConfig, SASRecConfig
from nestrec.models.backbone_spec import AttentionSpanConfig
from nestrec.ops.kernel_op import IS_INTERPRETED
from nestrec.serving.engine.reference_runner import BatchItem, ReferenceRunner, score_by_states
from nestrec.serving.kv_cache.kv_page_pool import PagePool
from nestrec.serving.model.model_adapter import make_adapter
from nestrec.serving.model.request_inputs import Candidates, History, number_bits
from nestrec.serving.model.row_sources import DramRows
from nestrec.serving.model.served_tables import CachedTable
from nestrec_bench.harness.random_model import random_ranking, random_retrieval
from support.random_models import with_user_prefix

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),  # padding rows are uninitialized
    pytest.mark.skipif(not IS_INTERPRETED, reason="needs TRITON_INTERPRET=1"),
]
SHAPES = [(0, 40, 3), (128, 150, 5), (20, 20, 0), (0, 130, 0), (64, 64, 7)]
"""Per request: first new token, end of the tokens, number of candidates."""


def make_parts(form, rng, shapes):
    """Draw a batch with these shapes; return its items and the number of pages."""
    parts = []
    page = 0
    num_prefix_tokens = len(form.servable.prefix_columns)
    user_values = {
        field: 1 + index % 2 if column.has_table else int(number_bits(rng.normal(size=1).astype(np.float32))[0])
        for column in form.servable.prefix_columns
        for index, field in enumerate(column.fields)
    }
    for first, end, num_candidates in shapes:
        count = (end - num_prefix_tokens) // form.tokens_per_event
        history = History(
            items=rng.integers(1, 100, count),
            times_ms=np.sort(rng.integers(0, 10**10, count)),
            actions=rng.integers(0, 4, count),
            features={"event_tab": rng.integers(0, 3, count)} | {n: np.full(count, v) for n, v in user_values.items()},
        )
        candidates = Candidates(
            items=rng.integers(1, 100, num_candidates),
            now_ms=2 * 10**10,
            features={"event_tab": rng.integers(0, 3, num_candidates)}
            | {n: np.full(num_candidates, v) for n, v in user_values.items()},
        )
        pages = list(range(page, page + -(-end // 64)))[::-1]
        page += len(pages)
        part = BatchItem(
            tokens=form.tokens(history, candidates.now_ms),
            first=first,
            end=end,
            pages=pages,
            store_until=end,
            candidates=candidates if num_candidates else None,
        )
        parts.append(replace(part, store_until=min(end, part.tokens.num_cacheable)))
    return parts, page


RANK_SHAPES = [(0, 40, 3), (128, 150, 5), (64, 64, 2)]
PREINFER_SHAPES = [(0, 130, 0), (64, 100, 0)]
RETRIEVAL_SHAPES = [(0, 40, 3), (128, 150, 5), (0, 20, 0), (63, 64, 7)]
"""Shapes of retrieval: the last event of a request with candidates is new."""
SIZES = {"dim": 32, "num_layers": 2, "num_heads": 2, "max_length": 402}
TIMES = {"time_bias": True}
ENCODERS = {
    "plain": HSTUConfig(**SIZES, head_dim=16, position_bias=False),
    "local": HSTUConfig(
        **SIZES, head_dim=16, position_bias=False, attention=AttentionSpanConfig(window=30, num_prefix_tokens=70)
    ),
    "tables": HSTUConfig(**SIZES, head_dim=12, **TIMES),
    "function": HSTUConfig(**SIZES, head_dim=16, **TIMES, time_encoding="functional"),
    "layers differ": HSTUConfig(
        **SIZES | {"num_layers": 4},
        head_dim=16,
        attention=AttentionSpanConfig(window=40, num_full_layers=1, truncate_to=50, truncate_from_layer=3),
    ),
    "fuxi": FuXiConfig(**SIZES, head_dim=16, ffn_dim=24),
    "sasrec": SASRecConfig(**SIZES, ffn_dim=24),
}


SLOW_KINDS = ("plain", "function")
"""Encoders that other tests cover as well."""


def run_both(make_model, encoder, shapes, num_candidates, *, is_cached=False, prefix_dtype="model", is_searched=False):
    """Run a batch with the reference runner and over pages.

    Args:
        make_model: Function that creates a random servable.
        encoder: Config of its encoder.
        shapes: Shapes of the requests.
        num_candidates: Capacity of the batch buffer for candidates.
        is_cached: Whether item rows are read through a row cache.
        prefix_dtype: Data type of the KV cache.
        is_searched: Whether the paged pass searches the index and returns items.

    Returns:
        Results over pages, reference results, page pools (reference, paged), and the batch items.
    """
    from nestrec.base.lazy import import_attribute
    from nestrec.serving.engine.batch_layout import BatchBuffer, Extent, RequestRows, Sections, lay_out
    from nestrec.serving.engine.graph_runner import (
        CapturedGraph,
        GraphSearch,
        can_search_in_graph,
        content_buffer,
        layout_of,
        results_of_keys,
        write_pairs,
    )

    servable = make_model(encoder, num_items=100)
    if is_cached:
        rows = DramRows(servable.tables["items"].weight)
        servable = replace(servable, tables={**servable.tables, "items": CachedTable(rows, torch.device("cpu"), 9)})
    form = make_adapter(servable)
    parts, num_pages = make_parts(form, np.random.default_rng(1), shapes)
    if is_searched:
        parts = [with_search(part, 7 + number) for number, part in enumerate(parts)]
        assert can_search_in_graph(parts)
    pools = [
        PagePool(
            servable.cache_spec,
            num_pages=num_pages,
            page_tokens=64,
            device=torch.device("cpu"),
            dtype=torch.float32,
            kv_cache_dtype=prefix_dtype,
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
            pools[1].paged_kv_cache.times[slots] = part.tokens.time_T[: part.first]
    expected = ReferenceRunner(form, pools[0]).run(parts)
    encoder = import_attribute(servable.cached_forward.paged)(form.encoder, pools[1].paged_kv_cache)
    rows = RequestRows.of(form, parts)
    extent = Extent.of(rows, pools[1].page_tokens)
    buffer = BatchBuffer(512, num_candidates, 16, layout_of(form, encoder), 256 if is_searched else 0)
    best = GraphSearch(form) if is_searched else None
    captured = CapturedGraph(form, encoder, buffer, content_buffer(form, buffer.num_records), best)
    assert buffer.has_capacity_for(extent)
    packed = torch.full((buffer.num_indices,), 10**6, dtype=torch.int32)  # leftovers of an earlier batch; never read
    sections = Sections(buffer, packed.numpy())
    with torch.inference_mode():
        lay_out(pools[1], rows, sections)
        captured.copy_content(sections, extent.num_records)
        with_candidates = [part for part in parts if part.candidates is not None]
        if is_searched:
            write_pairs([part.candidates for part in with_candidates], sections.pairs_2P)
        found = captured.run(packed)[: extent.num_candidates]
        if is_searched:
            return results_of_keys(parts, found), expected, pools, parts
        if not form.appends_candidates:
            found = score_by_states(form, with_candidates, list(found))
            found = torch.cat([torch.from_numpy(scored.scores) for scored in found])
    reference = np.concatenate([np.zeros((0, len(form.outputs))), *(s.scores for s in expected if s is not None)])
    return found.numpy(), reference, pools, parts


USER_PREFIX_SHAPES = [(0, 41, 3), (2, 43, 0), (129, 151, 5), (65, 65, 2)]
"""Shapes with three user tokens before the history; in some of them, user tokens are cached."""


@pytest.mark.parametrize(
    ("make_model", "kind", "shapes"),
    [
        (random_ranking, "tables", USER_PREFIX_SHAPES),
        pytest.param(random_ranking, "local", USER_PREFIX_SHAPES, marks=pytest.mark.slow),
        pytest.param(random_ranking, "layers differ", USER_PREFIX_SHAPES, marks=pytest.mark.slow),
        pytest.param(random_ranking, "sasrec", USER_PREFIX_SHAPES, marks=pytest.mark.slow),
        pytest.param(random_retrieval, "tables", RETRIEVAL_SHAPES, marks=pytest.mark.slow),
    ],
)
def test_paged_batch_with_prefix_tokens_equals_reference(make_model, kind, shapes):
    found, reference, pools, parts = run_both(with_user_prefix(make_model), ENCODERS[kind], shapes, 64)
    assert np.abs(found - reference).max() <= 1e-5
    if kind != "layers differ":
        torch.testing.assert_close(pools[1].tensor, pools[0].tensor, rtol=1e-4, atol=1e-5)
    assert all(len(part.tokens.prefix_records) == 3 for part in parts)


def with_search(part, count):
    """Search the best `count` items outside the history instead of scoring candidates; not for pre-infer requests."""
    if part.candidates is None:
        return part
    excluded = np.unique(part.tokens.columns[0])
    no_items = np.zeros(0, np.int64)
    return replace(part, candidates=replace(part.candidates, items=no_items, num_best=count, excluded=excluded))


def fill(pool, values):
    """Fill a page pool with random keys and values."""
    for layer in range(len(values)):
        pages = list(range(pool.num_pages))
        pool.write(layer, pages, 0, values[layer, 0].transpose(0, 1), values[layer, 1].transpose(0, 1))


@pytest.mark.parametrize(
    ("kind", "is_cached", "shapes", "num_candidates"),
    [
        *(
            pytest.param(
                kind, kind == "local", RANK_SHAPES, 512, marks=[pytest.mark.slow] if kind in SLOW_KINDS else []
            )
            for kind in ENCODERS
        ),
        pytest.param("plain", False, SHAPES, 512, marks=pytest.mark.slow),
        ("plain", False, SHAPES, 15),
        ("tables", False, PREINFER_SHAPES, 0),
    ],
)
def test_paged_batch_equals_single_sequences(kind, is_cached, shapes, num_candidates):
    found, reference, pools, parts = run_both(
        random_ranking, ENCODERS[kind], shapes, num_candidates, is_cached=is_cached
    )
    assert found.shape == reference.shape
    assert np.abs(found - reference).max(initial=0.0) <= 1e-5
    if kind != "layers differ":  # after a truncation, no layer reads the earlier keys and values
        torch.testing.assert_close(pools[1].tensor, pools[0].tensor, rtol=1e-4, atol=1e-5)
    for part in parts:
        if pools[1].paged_kv_cache.times is not None:
            cached_times = pools[1].paged_kv_cache.times[torch.from_numpy(pools[1].slots(part.pages, 0, part.end))]
            assert torch.equal(cached_times, part.tokens.time_T[: part.end])


@pytest.mark.parametrize("kind", ["tables", pytest.param("fuxi", marks=pytest.mark.slow), "sasrec"])
def test_paged_batch_retrieval_uses_last_states(kind):
    found, reference, _, _ = run_both(random_retrieval, ENCODERS[kind], RETRIEVAL_SHAPES, 64)
    assert np.abs(found - reference).max() <= 1e-4


def test_paged_batch_fused_search_equals_separate_search():
    found, reference, _, parts = run_both(random_retrieval, ENCODERS["plain"], RETRIEVAL_SHAPES, 16, is_searched=True)
    for paged, expected, part in zip(found, reference, parts, strict=True):
        assert (paged is None) == (expected is None) == (part.candidates is None)
        if paged is not None:
            assert len(paged.items) == part.candidates.num_best
            assert not np.isin(paged.items, part.candidates.excluded).any()
            np.testing.assert_array_equal(paged.items, expected.items)
            np.testing.assert_allclose(paged.scores, expected.scores, atol=1e-4)


def test_paged_batch_fp8_kv_cache_equals_reference():
    found, reference, pools, _ = run_both(random_ranking, ENCODERS["tables"], RANK_SHAPES, 512, prefix_dtype="fp8")
    assert np.abs(found - reference).max() <= 1e-5
    assert (pools[0].tensor.view(torch.uint8) != pools[1].tensor.view(torch.uint8)).float().mean() < 1e-3
