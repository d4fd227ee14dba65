"""Tiled cross-entropy equals cross-entropy over the full logits, for tiles smaller and larger than the data."""

import pytest
import torch

from nestrec.ops.losses.cross_entropy import in_place_cross_entropy, tiled_cross_entropy
from nestrec.ops.losses.item_losses import full_cross_entropy


@pytest.mark.parametrize("shape", [(0, 5, 3), (1, 1, 1), (7, 11, 4), (40, 130, 9)])
@pytest.mark.parametrize("tile", [(1, 1), (3, 4), (1000, 1000)])
def test_tiled_cross_entropy_and_gradients_equal_full(shape, tile):
    num_tokens, num_items, dim = shape
    torch.manual_seed(0)
    query = torch.randn(num_tokens, dim, dtype=torch.float64) * 3
    rows = torch.randn(num_items, dim, dtype=torch.float64)
    target = torch.randint(num_items, (num_tokens,))
    found = []
    for tiled in (False, True):
        leaves = query.clone().requires_grad_(), rows.clone().requires_grad_()
        options = {"tile_tokens": tile[0], "tile_items": tile[1]} if tiled else {}
        loss = (tiled_cross_entropy if tiled else full_cross_entropy)(*leaves, target, **options)
        (loss * torch.linspace(0.5, 1.5, num_tokens, dtype=torch.float64)).sum().backward()
        found.append([loss.detach(), leaves[0].grad, leaves[1].grad])
    for full, tiled in zip(*found, strict=True):
        assert torch.allclose(full, tiled, rtol=1e-12, atol=1e-12)


def test_tiled_cross_entropy_bfloat16_uses_float32_sums():
    query, rows = torch.randn(64, 8).bfloat16(), torch.randn(3000, 8).bfloat16()
    target = torch.randint(3000, (64,))
    exact = full_cross_entropy(query.double(), rows.double(), target)
    eager = (full_cross_entropy(query, rows, target) - exact).norm()
    tiled = tiled_cross_entropy(query, rows, target, tile_tokens=16, tile_items=500)
    assert tiled.dtype == torch.float32
    assert (tiled - exact).norm() <= 2 * eager


@pytest.mark.parametrize(("num_tokens", "num_items", "tile"), [(0, 5, 10), (1, 1, 1), (50, 11, 1), (50, 130, 1 << 12)])
def test_in_place_cross_entropy_equals_reference(num_tokens, num_items, tile, monkeypatch):
    monkeypatch.setattr("nestrec.ops.losses.cross_entropy.TILE_ELEMENTS", tile)
    torch.manual_seed(0)
    query = torch.randn(num_tokens, 4, dtype=torch.float64) * 300  # the exponentials of such logits overflow
    rows = torch.randn(num_items, 4, dtype=torch.float64)
    target = torch.randint(num_items, (num_tokens,))
    found = []
    for cross_entropy in (full_cross_entropy, in_place_cross_entropy):
        leaves = query.clone().requires_grad_(), rows.clone().requires_grad_()
        loss = cross_entropy(*leaves, target)
        (loss * torch.linspace(0.5, 1.5, num_tokens, dtype=torch.float64)).sum().backward()
        found.append([loss.detach(), leaves[0].grad, leaves[1].grad])
    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


def test_in_place_cross_entropy_stores_logits_once():
    """One number per token and item is stored between the passes; the backward pass overwrites it."""
    query, rows = torch.randn(64, 8, requires_grad=True), torch.randn(3000, 8, requires_grad=True)
    target = torch.randint(3000, (64,))
    loss = in_place_cross_entropy(query, rows, target)
    assert loss.grad_fn is not None
    assert sum(logits.numel() for logits in loss.grad_fn.logits) == 64 * 3000
    loss.sum().backward()
    with pytest.raises(RuntimeError):
        loss.sum().backward()
