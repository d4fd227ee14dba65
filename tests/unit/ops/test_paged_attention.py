"""The paged kernel against the definition: on a GPU, or in Triton's interpreter."""

import numpy as np
import pytest
import torch

from nestrec.ops.attention.cached import cached_attention_reference
from nestrec.ops.attention.mask import PLAIN, semi_local
from nestrec.ops.attention.paged_blocks import FIELDS, PagedSegment, segment_array, write_blocks
from nestrec.ops.registry import IS_INTERPRETED

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.skipif(not (IS_INTERPRETED or torch.cuda.is_available()), reason="needs a GPU, or TRITON_INTERPRET=1"),
]
PAGE, HEADS, DIM, NORMALISER = 64, 2, 16, 5.0
SHAPES = [(0, 1, 0), (0, 5, 3), (64, 0, 3), (100, 1, 0), (70, 130, 2), (0, 200, 140), (65, 64, 129), (3, 0, 1)]
"""(prefix, new history, candidates)"""


def run_paged(shapes, dtype, device, rules=PLAIN):
    """Outputs of one batch, and for each sequence its inputs."""
    from nestrec.ops.attention.paged import Workspace, paged_attention, store_in_pages

    generator = torch.Generator().manual_seed(1)
    history_total = sum(s for _, s, _ in shapes)
    total = history_total + sum(c for _, _, c in shapes)
    num_pages = sum(-(-p // PAGE) for p, _, _ in shapes) + 1
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(device, dtype)  # noqa: E731
    qkv = draw(total, 3 * HEADS * DIM)
    q, k, v = qkv.chunk(3, dim=1)
    pool = torch.full((2, HEADS, num_pages * PAGE, DIM), float("nan"), device=device, dtype=dtype)
    order = np.random.default_rng(2).permutation(num_pages)
    segments, pages, prefixes, row, candidate_row = [], [], [], 0, history_total
    for prefix, history, candidates in shapes:
        segments.append(
            PagedSegment(
                prefix_length=prefix,
                num_history=history,
                num_candidates=candidates,
                history_row=row,
                candidate_row=candidate_row,
                first_page=len(pages),
            )
        )
        own = order[len(pages) : len(pages) + -(-prefix // PAGE)]
        pages += list(own)
        token = np.arange(prefix)
        slots = torch.from_numpy(own[token // PAGE] * PAGE + token % PAGE).to(device, torch.int32)
        old_k, old_v = draw(prefix, HEADS * DIM), draw(prefix, HEADS * DIM)
        if prefix:
            store_in_pages(old_k, old_v, pool, slots)
        prefixes.append((old_k, old_v))
        row, candidate_row = row + history, candidate_row + candidates
    blocks = np.full((40, FIELDS), 99, np.int32)
    write_blocks(segment_array(segments), HEADS, False, blocks, rules.max_attention_length or 0, rules.num_context)
    workspace = Workspace.make(HEADS, DIM, torch.device(device))
    out = paged_attention(
        q,
        k,
        v,
        pool,
        torch.from_numpy(blocks).to(device),
        torch.tensor([*pages, 0], dtype=torch.int32, device=device),
        workspace=workspace,
        page_tokens=PAGE,
        normaliser=NORMALISER,
        rules=rules,
    )
    assert not workspace.arrived.any()
    return out, (q, k, v), segments, prefixes


def largest_error(shapes, dtype, device, rules=PLAIN):
    out, new, segments, prefixes = run_paged(shapes, dtype, device, rules)
    worst = 0.0
    for segment, old in zip(segments, prefixes, strict=True):
        rows = [
            *range(segment.history_row, segment.history_row + segment.num_history),
            *range(segment.candidate_row, segment.candidate_row + segment.num_candidates),
        ]
        heads = lambda x: x.double().unflatten(1, (HEADS, DIM)).transpose(0, 1)  # noqa: E731
        expected = cached_attention_reference(
            *(heads(x[rows]) for x in new),
            tuple(heads(x) for x in old),
            num_candidates=segment.num_candidates,
            normaliser=NORMALISER,
            rules=rules,
        )
        difference = heads(out[rows]) - expected
        worst = max(worst, float(difference.norm() / expected.norm()))
    return worst


@pytest.mark.parametrize("shapes", [[shape] for shape in SHAPES] + [SHAPES])
def test_paged_attention_equals_its_definition(shapes):
    assert largest_error(shapes, torch.float32, "cpu" if IS_INTERPRETED else "cuda") <= 1e-5


LONG = [(1100, 0, 3), (1345, 70, 66), (600, 5, 0), (0, 40, 2), (512, 1, 1)]


def test_divided_prefixes_give_the_same_sums():
    assert largest_error(LONG, torch.float32, "cpu" if IS_INTERPRETED else "cuda") <= 1e-5


@pytest.mark.parametrize(("window", "prefix"), [(1, 0), (40, 70), (600, 200)])
def test_windows_and_prefixes_equal_their_definition(window, prefix):
    rules, device = semi_local(window, prefix), "cpu" if IS_INTERPRETED else "cuda"
    assert largest_error([(3, 0, 1), (70, 130, 2), (0, 70, 3), (1345, 70, 5)], torch.float32, device, rules) <= 1e-5


def test_keys_outside_of_windows_are_not_read():
    segments, blocks = segment_array([PagedSegment(100_000, 64, 64, 0, 64, 0)]), np.empty((400, FIELDS), np.int32)
    read = []
    for window, context in ((0, 0), (1024, 0), (1024, 256)):
        count = write_blocks(segments, 8, False, blocks, window, context)
        read.append(int((blocks[:count, 2] - blocks[:count, 8]).sum()) // 2)
    assert read[0] == 100_000
    assert 1024 <= read[1] <= 1024 + 192
    assert read[2] == read[1] + 256


@pytest.mark.parametrize(("most", "num_blocks"), [(40, 21), (16, 15), (10, 10)])
def test_prefixes_are_divided_as_far_as_the_table_has_room(most, num_blocks):
    segments = [PagedSegment(*shape, 0, 0, 0) for shape in LONG]
    assert write_blocks(segment_array(segments), HEADS, False, np.empty((most, FIELDS), np.int32), 0, 0) == num_blocks


def test_long_batches_that_keep_the_device_busy_are_not_divided_and_their_candidates_alone_are():
    segments = segment_array([PagedSegment(2048, 2048, 64, 0, 2048, 0)])
    blocks = np.empty((64, FIELDS), np.int32)
    assert write_blocks(segments, 8, False, blocks, 0, 0) == 33
    assert write_blocks(segments, 8, True, blocks, 0, 0) == 4
    assert (blocks[:4, 7] == 1).all()
    assert not blocks[4:].any()


def test_an_empty_plan_has_no_blocks():
    blocks = np.ones((3, FIELDS), np.int32)
    assert write_blocks(segment_array([]), 2, False, blocks, 0, 0) == 0
    assert not blocks.any()
