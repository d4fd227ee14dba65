"""The paged kernels equal their reference, on a GPU or in the Triton interpreter."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import silu

from nestrec.ops.attention.mask_and_bias import AttentionMask, RelativeBias, attention_mask
from nestrec.ops.attention.paged.query_blocks import (
    FIELDS,
    PagedSegment,
    VisibleRange,
    can_be_paged,
    max_tiles,
    segment_array,
    write_blocks,
)
from nestrec.ops.kernel_op import IS_INTERPRETED

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),  # padding rows are uninitialized
    pytest.mark.skipif(not (IS_INTERPRETED or torch.cuda.is_available()), reason="needs a GPU, or TRITON_INTERPRET=1"),
]
PAGE = 64
HEADS = 2
DIM = 16
SCALE = 0.2
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
SHAPES = [(0, 1, 0), (0, 5, 3), (64, 0, 3), (100, 1, 0), (70, 130, 2), (0, 200, 140), (65, 64, 129), (3, 0, 1)]
"""Numbers of prefix tokens, new history tokens and candidates."""
LONG = [(1100, 0, 3), (1345, 70, 130), (600, 5, 0), (0, 40, 2), (512, 1, 1)]
LONGEST = 1600
BIASES = {"none": (), "position": ("position",), "tables": ("position", "time"), "function": ("position", "function")}


class Batch:
    """One batch of requests of the given shapes, with pages in random order."""

    def __init__(self, shapes, dtype=torch.float32, *, dim=DIM, is_small=False, seen=VisibleRange(), cut=0):  # noqa: B008
        from nestrec.ops.attention.paged.paged_attention import PagedLayerKV, store_in_pages
        from nestrec.ops.attention.paged.paged_bias import PairPlan, PairTimes, store_times

        generator = torch.Generator().manual_seed(1)
        draw = lambda *shape: torch.randn(*shape, generator=generator).to(DEVICE, dtype)  # noqa: E731
        self.dim = dim
        self.seen = seen
        self.cut = cut if seen.is_cut else 0
        self.dtype = dtype
        history_total = sum(s for _, s, _ in shapes)
        total = history_total + sum(c for _, _, c in shapes)
        num_pages = sum(-(-p // PAGE) for p, _, _ in shapes) + 1
        self.q, self.k, self.v = draw(total, 3 * HEADS * dim).chunk(3, dim=1)
        self.time_T = torch.empty(total, dtype=torch.float64)
        self.query_time_T = torch.empty(total, dtype=torch.float64)
        pool = torch.full((2, HEADS, num_pages * PAGE, dim), float("nan"), device=DEVICE, dtype=dtype)
        scales = torch.full(pool.shape[:3], 255, dtype=torch.uint8, device=DEVICE) if is_small else None
        self.cache = PagedLayerKV(pool.to(torch.float8_e4m3fn) if is_small else pool, scales)
        slot_times = torch.full((num_pages * PAGE,), float("nan"), dtype=torch.float64, device=DEVICE)
        order = np.random.default_rng(2).permutation(num_pages)
        self.segments = []
        pages = []
        self.old = []
        row = 0
        candidate_row = history_total
        for prefix, history, num_candidates in shapes:
            self.segments.append(PagedSegment(prefix, history, num_candidates, row, candidate_row, len(pages), cut))
            own = order[len(pages) : len(pages) + -(-prefix // PAGE)]
            pages += list(own)
            token = np.arange(prefix)
            slots = torch.from_numpy(own[token // PAGE] * PAGE + token % PAGE).to(DEVICE, torch.int32)
            k, v = draw(prefix, HEADS * dim), draw(prefix, HEADS * dim)
            times = torch.rand(prefix + history + 1, generator=generator, dtype=torch.float64).mul(1e5).cumsum(0)
            if prefix:
                store_in_pages(k, v, self.cache, slots)
                store_times(times[:prefix].to(DEVICE), slots, slot_times)
            self.old.append((k, v, times[:prefix]))
            new, candidates = slice(row, row + history), slice(candidate_row, candidate_row + num_candidates)
            self.time_T[new], self.query_time_T[new] = times[prefix:-1], times[prefix + 1 :]
            self.time_T[candidates], self.query_time_T[candidates] = times[-1], times[-1] + 777.0
            row += history
            candidate_row += num_candidates
        blocks = np.full((40, FIELDS), 99, np.int32)
        write_blocks(segment_array(self.segments), HEADS, False, blocks, seen)
        self.plan = PairPlan(
            blocks=torch.from_numpy(blocks).to(DEVICE),
            pages=torch.tensor([*pages, 0], dtype=torch.int32, device=DEVICE),
            page_tokens=PAGE,
            num_tiles=max_tiles(40, LONGEST),
            visible_range=seen,
        )
        own = (self.time_T.to(DEVICE), self.query_time_T.to(DEVICE))
        self.times = PairTimes(slots=slot_times, time_T=own[0], query_time_T=own[1])
        self.learned = SimpleNamespace(
            position=torch.randn(2 * LONGEST - 1, generator=generator).mul(0.5).to(DEVICE, dtype),
            time=torch.randn(65, generator=generator).mul(0.5).to(DEVICE, dtype),
            function=torch.tensor([0.7, 11.0, -0.5]).to(DEVICE, dtype),
        )

    def run(self, weights, kinds):
        from nestrec.ops.attention.paged.paged_attention import Workspace, paged_attention
        from nestrec.ops.attention.paged.paged_bias import compute_buckets, write_biases

        biases = None
        learned = self.learned
        if kinds:
            biases = self.plan.allocate_tiles(self.dtype)
            write_biases(
                biases,
                self.plan,
                position_table=learned.position if "position" in kinds else None,
                time_table=learned.time if "time" in kinds else None,
                buckets=compute_buckets(self.plan, self.times, 64) if "time" in kinds else None,
                time_function=learned.function if "function" in kinds else None,
                times=self.times,
            )
        workspace = Workspace.create(HEADS, self.dim, DEVICE)
        out = paged_attention(
            None if weights == "channel" else self.q,
            self.k,
            self.v,
            self.cache,
            self.plan.blocks,
            self.plan.pages,
            workspace=workspace,
            page_tokens=PAGE,
            scale=SCALE,
            weights=weights,
            biases=biases,
            visible_range=self.seen,
        )
        assert not workspace.arrived.any()
        return out

    def expected(self, b, weights, kinds):
        """Return the (N, H * D) reference result of a request in float64, computed with one mask."""
        segment = self.segments[b]
        (old_k, old_v, old_time) = self.old[b]
        rows = self.rows(b)
        num_prefix = segment.prefix_length
        length = segment.prefix_length + len(rows)
        rules = AttentionMask(
            num_targets_B=torch.tensor([segment.num_candidates]),
            num_context=self.seen.context,
            max_attention_length=self.seen.window or None,
            looks_ahead=False,
        )
        seen_NK = attention_mask(torch.tensor([0, length]), length, rules)[0, num_prefix:].clone()
        seen_NK &= (torch.arange(length) >= self.cut)[None]
        heads = lambda x: x.cpu().double().unflatten(1, (HEADS, self.dim)).transpose(0, 1)  # noqa: E731
        keys, values = (heads(torch.cat([old, new[rows]])) for old, new in ((old_k, self.k), (old_v, self.v)))
        bias = torch.zeros(length, length, dtype=torch.float64)
        if kinds:
            learned = self.learned
            bias = RelativeBias(
                position_table=learned.position.cpu().double() if "position" in kinds else None,
                time_table=learned.time.cpu().double() if "time" in kinds else None,
                time_function=learned.function.cpu().double() if "function" in kinds else None,
                time_T=torch.cat([old_time, self.time_T[rows]]),
                query_time_T=torch.cat([old_time, self.query_time_T[rows]]),
            ).dense(torch.tensor([0, length]), length, rules)[0]
        bias = bias[num_prefix:]
        scores = heads(self.q[rows]) @ keys.transpose(1, 2)
        if weights == "softmax":
            found = (SCALE * scores).masked_fill(~seen_NK, -torch.inf).softmax(2)
        else:
            found = SCALE * seen_NK * (bias[None] if weights == "channel" else silu(scores + bias))
        return (found @ values).transpose(0, 1).flatten(1)

    def rows(self, b):
        s = self.segments[b]
        return [
            *range(s.history_row, s.history_row + s.num_history),
            *range(s.candidate_row, s.candidate_row + s.num_candidates),
        ]

    def error(self, weights="silu", kinds=()):
        out = self.run(weights, kinds).cpu().double()
        worst = 0.0
        for b in range(len(self.segments)):
            if len(rows := self.rows(b)):
                # Rows before a cut are not computed.
                num_cut = min(max(0, self.cut - self.segments[b].prefix_length), self.segments[b].num_history)
                expected = self.expected(b, weights, kinds)[num_cut:]
                difference = float((out[rows[num_cut:]] - expected).norm() / expected.norm())
                worst = max(worst, np.inf if np.isnan(difference) else difference)
        return worst


@pytest.mark.parametrize("shapes", [[shape] for shape in SHAPES] + [SHAPES])
def test_paged_attention_equals_reference(shapes):
    assert Batch(shapes).error() <= 1e-5


def test_paged_attention_with_divided_prefixes_equals_reference():
    assert Batch(LONG).error() <= 1e-5


WINDOWS = [VisibleRange(1), VisibleRange(40, 70), VisibleRange(600, 200)]
SOME = [(3, 0, 1), (70, 130, 2), (0, 70, 3), (1345, 70, 5)]


@pytest.mark.parametrize("seen", WINDOWS)
def test_paged_attention_with_windows_equals_reference(seen):
    assert Batch(SOME, seen=seen).error() <= 1e-5


FEW = [(70, 130, 2), (600, 3, 130), (0, 5, 0)]
"""A short prefix, a divided prefix, and several blocks of candidates."""
MANY = [pytest.param(shapes, marks=pytest.mark.slow) for shapes in (SHAPES, LONG)]


@pytest.mark.parametrize("kind", [pytest.param("position", marks=pytest.mark.slow), "tables", "function"])
@pytest.mark.parametrize("shapes", [FEW, *MANY])
def test_paged_attention_with_biases_equals_reference(kind, shapes):
    assert Batch(shapes).error(kinds=BIASES[kind]) <= 2e-5


@pytest.mark.parametrize(
    "seen",
    [
        pytest.param(VisibleRange(40, 70), marks=pytest.mark.slow),
        VisibleRange(0, 0, is_cut=True),
        VisibleRange(30, 0, is_cut=True),
    ],
)
@pytest.mark.parametrize("cut", [37, pytest.param(128, marks=pytest.mark.slow)])
def test_paged_attention_with_biases_windows_and_cuts(seen, cut):
    assert Batch([(70, 66, 2), (128, 3, 3), (0, 130, 2)], seen=seen, cut=cut).error(kinds=BIASES["tables"]) <= 2e-5


@pytest.mark.parametrize(("dim", "weights"), [(6, "softmax"), (50, "silu")])
def test_paged_attention_accepts_any_head_dim(dim, weights):
    assert Batch(FEW, dim=dim).error(weights) <= 1e-5


@pytest.mark.parametrize("shapes", MANY)
def test_paged_attention_softmax_covers_cached_and_new_keys(shapes):
    assert Batch(shapes).error("softmax") <= 1e-5


@pytest.mark.parametrize(
    "kinds", [("time",), *(pytest.param((k,), marks=pytest.mark.slow) for k in ("position", "function"))]
)
def test_paged_attention_bias_channels_equal_reference(kinds):
    assert Batch(FEW).error("channel", kinds) <= 2e-5


@pytest.mark.parametrize("kind", [pytest.param("none", marks=pytest.mark.slow), "tables"])
def test_paged_attention_float16_error_is_bounded(kind):
    assert Batch(FEW, torch.float16).error(kinds=BIASES[kind]) <= 3e-3


HALF = pytest.param(torch.bfloat16, marks=pytest.mark.skipif(IS_INTERPRETED, reason="needs a GPU"))


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_paged_attention_fp8_prefixes_equal_reference(dtype):
    """The result equals the reference over the contents of the pages, which are close to the original values."""
    batch = Batch(FEW[:2], dtype, is_small=True)
    assert 1e-3 < batch.error() <= 0.05
    powers = torch.exp2(batch.cache.scales.float() - 127.0)
    read = batch.cache.pool.float() * powers[..., None]
    pages = batch.plan.pages.tolist()
    old = []
    for segment, (k, _, times) in zip(batch.segments, batch.old, strict=True):
        token = np.arange(segment.prefix_length)
        own = np.array(pages[segment.first_page :])[token // PAGE] * PAGE + token % PAGE
        both = read[:, :, torch.from_numpy(own).to(DEVICE)].transpose(1, 2).flatten(2)
        assert (both[0] - k).abs().max() <= k.abs().max() / 16
        old.append((both[0], both[1], times))
    batch.old = old
    assert batch.error() <= (1e-5 if dtype == torch.float32 else 0.01)


def test_paged_attention_skips_keys_outside_of_window():
    segments = segment_array([PagedSegment(100_000, 64, 64, 0, 64, 0)])
    blocks = np.empty((400, FIELDS), np.int32)
    read = []
    for seen in (VisibleRange(), VisibleRange(1024), VisibleRange(1024, 256)):
        count = write_blocks(segments, 8, False, blocks, seen)
        read.append(int((blocks[:count, 2] - blocks[:count, 8]).sum()) // 2)
    assert read[0] == 100_000
    assert 1024 <= read[1] <= 1024 + 192
    assert read[2] == read[1] + 256


def test_paged_attention_skips_keys_before_cut():
    segments = segment_array([PagedSegment(100_000, 64, 64, 0, 64, 0, cut=99_000)])
    blocks = np.empty((400, FIELDS), np.int32)
    count = write_blocks(segments, 8, False, blocks, VisibleRange(is_cut=True))
    assert 1000 <= int((blocks[:count, 2] - blocks[:count, 8]).sum()) // 2 <= 1064


@pytest.mark.parametrize(("max_blocks", "num_blocks"), [(40, 18), (16, 13), (10, 9)])
def test_paged_attention_divides_prefixes_up_to_max_blocks(max_blocks, num_blocks):
    segments = [PagedSegment(*shape, 0, 0, 0) for shape in LONG]
    assert write_blocks(segment_array(segments), HEADS, False, np.empty((max_blocks, FIELDS), np.int32)) == num_blocks


def test_paged_attention_blocks_share_tiles_of_candidates():
    segments = [PagedSegment(*shape, 0, sum(s for _, s, _ in LONG), 0) for shape in LONG]
    blocks = np.zeros((40, FIELDS), np.int32)
    count = write_blocks(segment_array(segments), HEADS, False, blocks, VisibleRange(600, 200))
    used = []
    for b in blocks[:count]:
        has_own = b[7] > 0 and b[10] == b[9] - 1
        if b[17]:
            used.append(set(range(b[16], b[16] - (b[8] - b[2]) // 64 - (-b[6] // 64) + has_own)))
    assert len(used) == count - 2  # the second block of candidates of one request is in two parts
    assert sum(len(tiles) for tiles in used) == len(set().union(*used))
    assert max(max(tiles, default=0) for tiles in used) < max_tiles(count, LONGEST)


def test_paged_attention_splits_only_small_batches():
    segments = segment_array([PagedSegment(2048, 4096, 64, 0, 4096, 0)])
    blocks = np.empty((64, FIELDS), np.int32)
    assert write_blocks(segments, 8, False, blocks) == 33
    assert write_blocks(segments, 8, True, blocks) == 4
    assert (blocks[:4, 7] == 1).all()
    assert not blocks[4:].any()


def test_paged_attention_empty_plan_has_no_blocks():
    blocks = np.ones((3, FIELDS), np.int32)
    assert write_blocks(segment_array([]), 2, False, blocks) == 0
    assert not blocks.any()


@pytest.mark.parametrize(
    ("head_dim", "itemsize", "page_tokens", "expected"),
    [
        (128, 4, 64, True),
        (256, 2, 64, True),
        (256, 4, 64, False),
        (136, 4, 64, False),
        (64, 2, 16, True),
        (64, 2, 8, False),
        (64, 2, 48, False),
        (64, 2, 96, False),
        (64, 2, 128, True),
    ],
)
def test_paged_attention_falls_back_without_shared_memory(head_dim, itemsize, page_tokens, expected):
    """Queries of 128 rows, keys and values of 64 rows need 256 KiB with 256 columns of float32."""
    assert can_be_paged(head_dim, itemsize, page_tokens) is expected
