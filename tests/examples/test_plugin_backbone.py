"""The cached forward pass of the example backbone equals full passes."""

import sys
from pathlib import Path

import pytest
import torch

from nestrec.models.sequence import NewTokenSegment, uncached_forward

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("num_prefix", [0, 2])
def test_plugin_backbone_cached_forward_equals_full_pass(monkeypatch: pytest.MonkeyPatch, num_prefix: int) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples" / "plugin")
    from nestrec_plugin.backbone import Linear, LinearConfig, cached_forward

    torch.manual_seed(0)
    cfg = LinearConfig(dim=8, num_layers=2, num_heads=2, head_dim=4, max_length=9)
    model = Linear(cfg)
    times = torch.zeros(9, dtype=torch.float64)
    x = [torch.randn(7, 8), torch.randn(3, 8)]

    def segment(prefix: int, history: int, candidates: int) -> NewTokenSegment:
        return NewTokenSegment(
            prefix_length=prefix,
            num_history=history,
            num_candidates=candidates,
            time_K=times[: prefix + history],
            query_time_S=times[:history],
        )

    def none(layer: int, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty(2, 0, 4), torch.empty(2, 0, 4)

    full, _ = uncached_forward(model, torch.cat(x), [segment(0, 5, 2), segment(0, 3, 0)], none)
    prefixes = torch.cat([states[:num_prefix] for states in x])
    _, cached = cached_forward(model, prefixes, [segment(0, num_prefix, 0)] * 2, none)

    def prefix(layer: int, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = slice(sequence * num_prefix, (sequence + 1) * num_prefix)
        return tuple(part[rows].transpose(0, 1) for part in cached[layer])

    rest = torch.cat([states[num_prefix:] for states in x])
    found, _ = cached_forward(
        model, rest, [segment(num_prefix, 5 - num_prefix, 2), segment(num_prefix, 3 - num_prefix, 0)], prefix
    )
    torch.testing.assert_close(found, torch.cat([full[num_prefix:7], full[7 + num_prefix :]]), rtol=1e-4, atol=1e-5)
    sys.modules.pop("nestrec_plugin.backbone"), sys.modules.pop("nestrec_plugin")
