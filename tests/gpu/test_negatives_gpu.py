"""Losses over negatives on a GPU: every variant equals the plain one and is deterministic."""

import pytest
import torch

from nestrec.ops.embedding.row_gather import HalfPrecisionRows
from nestrec.ops.losses.cross_entropy import tiled_cross_entropy
from nestrec.ops.losses.item_losses import LossCandidates, full_cross_entropy, make_candidates
from nestrec.ops.losses.sampled_losses import grouped_loss, sampled_loss, sum_outer

pytestmark = pytest.mark.gpu
STORED_ROWS = 1 << 18
WIDTH = 64


@pytest.mark.parametrize("variant", ["segments", "fused"])
def test_negatives_half_precision_rows_halve_loss_memory(variant):
    """The memory of the rows is halved; their gradient is float32 in both cases."""
    peaks = {}
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.randn(STORED_ROWS, WIDTH, device="cuda").to(dtype)
        index = torch.randint(STORED_ROWS, (256, 8), device="cuda", dtype=torch.int32)
        candidates = make_candidates(index[:, 0], index)
        query = torch.randn(256, WIDTH, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        rows = values.requires_grad_() if dtype == torch.float32 else HalfPrecisionRows.of(values)
        sampled_loss(query, rows, candidates, "sampled_softmax", variant=variant).sum().backward()
        peaks[dtype] = torch.cuda.max_memory_allocated()
        del values, rows
    saved = peaks[torch.float32] - peaks[torch.bfloat16]
    assert saved > 0.9 * STORED_ROWS * WIDTH * 2


CASES = [
    ((0, 3, 5, 50), "sampled_softmax", 0, False),
    ((1, 1, 1, 50), "sampled_softmax", 0, False),
    ((33, 17, 700, 50), "sampled_softmax", 2, True),
    ((130, 70, 9000, 50), "bce", 0, False),
    ((40, 130, 20000, 1024), "sampled_softmax", 2, True),
]
"""(tokens, negatives, rows, channels), loss, number of other tokens that share negatives, has log-Q correction."""


def random_inputs(shape, *, shared, bias, dtype, seed=0):
    num_tokens, num_negatives, num_rows, dim = shape
    torch.manual_seed(seed)
    query = torch.randn(num_tokens, dim, dtype=torch.float64, device="cuda") / dim**0.25
    rows = torch.randn(num_rows, dim, dtype=torch.float64, device="cuda") / dim**0.25
    positive = torch.randint(num_rows, (num_tokens,), device="cuda", dtype=torch.int32)
    negative = torch.randint(num_rows, (num_tokens, num_negatives), device="cuda", dtype=torch.int32)
    others = torch.randint(max(num_tokens, 1), (num_tokens, shared), device="cuda", dtype=torch.int32)
    biases = torch.randn(num_tokens, num_negatives, device="cuda") if bias else None
    candidates = make_candidates(positive, negative, bias_TR=biases, shared_TK=others if shared else None)
    return query.to(dtype), rows.to(dtype), candidates


def loss_and_gradients(query, rows, candidates, kind, **options):
    leaves = query.clone().requires_grad_(), rows.clone().requires_grad_()
    loss = sampled_loss(*leaves, candidates, kind, **options)
    (loss * torch.linspace(0.5, 1.5, len(loss), dtype=loss.dtype, device="cuda")).sum().backward()
    return [loss.detach(), *(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("variant", ["segments", "fused", "offload"])
def test_negatives_loss_variants_equal_plain_in_float64(variant):
    for shape, kind, shared, bias in CASES:
        inputs = random_inputs(shape, shared=shared, bias=bias, dtype=torch.float64)
        plain = loss_and_gradients(*inputs, kind)
        for segment_tokens in (7, 10_000):
            other = loss_and_gradients(*inputs, kind, variant=variant, segment_tokens=segment_tokens)
            for a, b in zip(plain, other, strict=True):
                assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("variant", ["segments", "fused", "offload"])
def test_negatives_loss_variants_have_bounded_error(variant, dtype):
    for seed, (shape, *_) in enumerate(CASES[2:]):
        narrow = random_inputs(shape, shared=1, bias=False, dtype=dtype, seed=seed)
        exact = loss_and_gradients(*(x.double() for x in narrow[:2]), narrow[2], "sampled_softmax")
        eager = loss_and_gradients(*narrow, "sampled_softmax")
        found = loss_and_gradients(*narrow, "sampled_softmax", variant=variant, segment_tokens=32)
        for a, b, c in zip(exact, eager, found, strict=True):
            assert (c.double() - a).norm() <= 2 * (b.double() - a).norm() + 1e-7 * a.norm()


@pytest.mark.parametrize("variant", ["segments", "fused", "offload"])
def test_negatives_loss_variants_are_deterministic(variant):
    torch.manual_seed(0)
    query, rows = torch.randn(500, 50, device="cuda"), torch.randn(300, 50, device="cuda")
    candidates = LossCandidates(torch.randint(300, (500, 65), device="cuda", dtype=torch.int32))
    first = loss_and_gradients(query, rows, candidates, "sampled_softmax", variant=variant, segment_tokens=64)
    for _ in range(20):
        again = loss_and_gradients(query, rows, candidates, "sampled_softmax", variant=variant, segment_tokens=64)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_negatives_gradients_of_shared_row_are_summed_in_runs():
    """Row 5 has 24,000 positions, as with in-batch negatives; its sum is deterministic."""
    torch.manual_seed(0)
    slope, query = torch.randn(8000, 9, device="cuda"), torch.randn(8000, 200, device="cuda")
    index = torch.randint(3000, (8000, 9), device="cuda", dtype=torch.int32)
    index[:, 2:5] = 5
    exact = torch.zeros(3000, 200, dtype=torch.float64, device="cuda")
    exact.index_add_(0, index.flatten(), (slope.double()[:, :, None] * query[:, None]).flatten(0, 1))
    first = sum_outer(slope, query, index, 3000)
    assert (first.double() - exact).norm() <= 1e-6 * exact.norm()
    assert all(torch.equal(sum_outer(slope, query, index, 3000), first) for _ in range(5))


@pytest.mark.parametrize("kind", ["sampled_softmax", "bce"])
def test_grouped_loss_on_gpu_is_close_to_float64_on_cpu(kind):
    """Vectors are bfloat16 and logits go up to 20; errors are those of bfloat16 products."""
    torch.manual_seed(0)
    query = (torch.randn(1000, 64) * 1.5).bfloat16()
    rows = torch.randn(300, 64).bfloat16()
    positive = torch.randint(300, (1000,), dtype=torch.int32)
    group = torch.full((8, 128), -1, dtype=torch.int32)
    for number, part in enumerate(torch.randperm(1000).chunk(8)):
        group[number, : len(part)] = part
    results = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.bfloat16)):
        leaves = [x.to(device, dtype).requires_grad_() for x in (query, rows)]
        loss = grouped_loss(*leaves, positive.to(device), group.to(device), kind)
        loss.sum().backward()
        results.append([loss.detach().cpu().double(), *(leaf.grad.cpu().double() for leaf in leaves)])
    for exact, found in zip(*results, strict=True):
        assert (found - exact).norm() <= 1e-2 * exact.norm()


def test_negatives_loss_never_reads_outside_rows():
    """Rows are surrounded by NaN, so that a read outside of them makes the loss NaN."""
    torch.manual_seed(0)
    padded = torch.full((40, 50), torch.nan, device="cuda")
    padded[10:30] = torch.randn(20, 50, device="cuda")
    candidates = LossCandidates(torch.randint(20, (33, 18), device="cuda", dtype=torch.int32))
    found = loss_and_gradients(
        torch.randn(33, 50, device="cuda"), padded[10:30], candidates, "sampled_softmax", variant="fused"
    )
    assert all(torch.isfinite(x).all() for x in found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_tiled_cross_entropy_equals_full(dtype):
    for num_tokens, num_items, dim in ((1, 1, 1), (7, 3000, 33), (300, 9000, 64)):
        torch.manual_seed(0)
        query = (torch.randn(num_tokens, dim, device="cuda") * 2).to(dtype)
        rows = torch.randn(num_items, dim, device="cuda").to(dtype)
        target = torch.randint(num_items, (num_tokens,))
        found = []
        for tiled, wide in ((False, True), (False, False), (True, False)):
            leaves = [(x.double() if wide else x).clone().requires_grad_() for x in (query, rows)]
            options = {"tile_tokens": 128, "tile_items": 2500} if tiled else {}
            loss = (tiled_cross_entropy if tiled else full_cross_entropy)(*leaves, target.cuda(), **options)
            loss.sum().backward()
            found.append([loss.detach(), leaves[0].grad, leaves[1].grad])
        for exact, eager, ours in zip(*found, strict=True):
            error = (ours.double() - exact).norm()
            floor = 1e-12 if dtype == torch.float64 else 1e-6
            assert error <= 2 * (eager.double() - exact).norm() + floor * exact.norm()
