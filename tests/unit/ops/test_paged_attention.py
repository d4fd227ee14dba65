"""The paged kernel against the definition: on a GPU, or in Triton's interpreter."""

import numpy as np
import pytest
import torch

from nestrec.ops.cached_attention import cached_attention_reference
from nestrec.ops.registry import IS_INTERPRETED

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.skipif(not (IS_INTERPRETED or torch.cuda.is_available()), reason="needs a GPU, or TRITON_INTERPRET=1"),
]
PAGE, HEADS, DIM, NORMALISER = 64, 2, 16, 5.0
SHAPES = [(0, 1, 0), (0, 5, 3), (64, 0, 3), (100, 1, 0), (70, 130, 2), (0, 200, 140), (65, 64, 129), (3, 0, 1)]
"""(prefix, new history, candidates)"""


def run_paged(shapes, dtype, device):
    """Outputs of one batch, and for each sequence its inputs."""
    from nestrec.ops.paged_attention import PagedSegment, paged_attention, plan_blocks, store_in_pages

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
    blocks = np.concatenate([plan_blocks(segments), np.zeros((2, 8), np.int32)])
    out = paged_attention(
        q, k, v, pool, torch.from_numpy(blocks).to(device), torch.tensor([*pages, 0], dtype=torch.int32, device=device),
        page_tokens=PAGE, normaliser=NORMALISER,
    )  # fmt: skip
    return out, (q, k, v), segments, prefixes


def largest_error(shapes, dtype, device):
    out, new, segments, prefixes = run_paged(shapes, dtype, device)
    worst = 0.0
    for segment, old in zip(segments, prefixes, strict=True):
        rows = [
            *range(segment.history_row, segment.history_row + segment.num_history),
            *range(segment.candidate_row, segment.candidate_row + segment.num_candidates),
        ]
        heads = lambda x: x.double().unflatten(1, (HEADS, DIM)).transpose(0, 1)  # noqa: E731
        expected = cached_attention_reference(
            *(heads(x[rows]) for x in new), tuple(heads(x) for x in old), num_candidates=segment.num_candidates,
            normaliser=NORMALISER,
        )  # fmt: skip
        difference = heads(out[rows]) - expected
        worst = max(worst, float(difference.norm() / expected.norm()))
    return worst


@pytest.mark.parametrize("shapes", [[shape] for shape in SHAPES] + [SHAPES])
def test_paged_attention_equals_its_definition(shapes):
    assert largest_error(shapes, torch.float32, "cpu" if IS_INTERPRETED else "cuda") <= 1e-5


def test_an_empty_plan_has_no_blocks():
    from nestrec.ops.paged_attention import FIELDS, plan_blocks

    assert plan_blocks([]).shape == (0, FIELDS)
