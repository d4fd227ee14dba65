"""Half-precision rows are read without a float32 copy, with the values and gradients of a float32 leaf."""

import pytest
import torch

from nestrec.ops.embedding.row_gather import HalfPrecisionRows, gather_rows
from nestrec.ops.embedding.stochastic_rounding import HALF_TYPES
from nestrec.ops.layers.token_input import unit_rows
from nestrec.ops.losses.item_losses import make_candidates
from nestrec.ops.losses.offloaded_vectors import OffloadedVectors
from nestrec.ops.losses.sampled_losses import VARIANTS, sampled_loss


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_half_precision_rows_equal_float32_leaf(dtype):
    torch.manual_seed(0)
    values = torch.randn(20, 6).to(dtype)
    index = torch.randint(0, 20, (9, 5))
    weight = torch.randn(9, 5, 6)
    gathered, scaled = [], []
    for rows in (HalfPrecisionRows.of(values), values.float().requires_grad_()):
        leaf = rows.anchor if isinstance(rows, HalfPrecisionRows) else rows
        vectors = gather_rows(rows, index)
        (vectors * weight).sin().sum().backward()
        assert vectors.dtype == leaf.grad.dtype == torch.float32
        gathered.append((vectors.detach(), leaf.grad.clone()))
        leaf.grad = None
        unit = unit_rows(rows, 3.0, 1e-6)
        (unit * weight[0, 0]).sin().sum().backward()
        scaled.append((unit.detach(), leaf.grad.clone()))
    for ours, expected in (*zip(*gathered, strict=True), *zip(*scaled, strict=True)):
        assert torch.equal(ours, expected)


def test_half_precision_gather_saves_no_rows_for_backward():
    stored = HalfPrecisionRows.of(torch.zeros(1000, 64, dtype=torch.bfloat16))
    saved_sizes = []
    assert stored.anchor.untyped_storage().nbytes() == 4

    def record(tensor: torch.Tensor) -> torch.Tensor:
        saved_sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        gather_rows(stored, torch.tensor([3, 4])).sum().backward()
    assert max(saved_sizes) <= 2


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_half_precision_rows_in_every_loss_variant(variant, dtype):
    torch.manual_seed(1)
    values, query = torch.randn(300, 8).to(dtype), torch.randn(11, 8)
    candidates = make_candidates(torch.randint(300, (11,)).int(), torch.randint(300, (11, 3)).int())
    results = []
    for rows in (HalfPrecisionRows.of(values), values.float().requires_grad_()):
        leaf = rows.anchor if isinstance(rows, HalfPrecisionRows) else rows
        query_leaf = query.clone().requires_grad_()
        loss = sampled_loss(query_leaf, rows, candidates, "sampled_softmax", variant=variant, segment_tokens=4)
        loss.sum().backward()
        results.append((loss.detach(), query_leaf.grad, leaf.grad))
    assert all(torch.equal(ours, expected) for ours, expected in zip(*results, strict=True))
    assert results[0][2].dtype == torch.float32


def test_half_precision_offloaded_vectors_halve_host_memory():
    index = torch.zeros(5, 7, dtype=torch.int32)
    tables = torch.zeros(9, 4, dtype=torch.float16), torch.zeros(9, 4)
    sizes = [OffloadedVectors(rows, index, 2).num_bytes for rows in tables]
    assert 2 * sizes[0] == sizes[1] == 5 * 7 * 4 * 4
