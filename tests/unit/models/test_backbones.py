"""Specs of backbones match their models, and missing fields of a spec are errors."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from nestrec.base.errors import UserError
from nestrec.models import FuXiConfig, HSTUConfig, SASRecConfig, SequenceInfo
from nestrec.models import backbone_registry as registry
from nestrec.models.backbone_registry import (
    BACKBONES,
    activations_of,
    cached_forward_of,
    flops_of,
    make_encoder,
    reads_times,
)
from nestrec.models.backbone_spec import BackboneSpec

SIZES = {"dim": 12, "num_layers": 3, "max_length": 9}
CONFIGS = [
    HSTUConfig(**SIZES, num_heads=2, head_dim=4),
    FuXiConfig(**SIZES, num_heads=2, head_dim=4, ffn_dim=10),
    FuXiConfig(**SIZES, num_heads=2, head_dim=4, ffn_dim=10, time_channel=False),
    SASRecConfig(**SIZES, num_heads=2, ffn_dim=10),
]


@pytest.mark.parametrize("cfg", CONFIGS, ids=lambda cfg: f"{cfg.kind}-{getattr(cfg, 'time_channel', '')}")
def test_backbone_flops_per_token_are_twice_the_weights(cfg):
    """Positions, norms and biases are added; all other parameters of a layer are matrices."""
    layers = make_encoder(cfg).layers
    matrices = sum(p.numel() for p in layers.parameters() if p.ndim == 2)
    assert flops_of(cfg).token == 2 * matrices


@pytest.mark.parametrize("cfg", CONFIGS, ids=lambda cfg: f"{cfg.kind}-{getattr(cfg, 'time_channel', '')}")
def test_backbone_flops_sum_tokens_and_causal_pairs(cfg):
    flops = flops_of(cfg)
    pairs = sum(1 for length in (3, 5) for i in range(length) for j in range(i + 1))
    assert flops.total(np.array([3, 5])) == 8 * flops.token + pairs * (flops.pair + flops.channel_pair)
    assert activations_of(cfg) > cfg.num_layers * cfg.dim


@pytest.mark.parametrize(
    ("cfg", "reads"),
    [
        (HSTUConfig(), False),
        (HSTUConfig(time_bias=True), True),
        (FuXiConfig(), True),
        (SASRecConfig(), False),
        (HSTUConfig(time_bias=True, time_encoding="functional"), True),
        (FuXiConfig(time_encoding="functional"), True),
    ],
)
def test_backbone_declares_whether_it_reads_times(cfg, reads):
    small = replace(cfg, dim=8, max_length=4, **({} if isinstance(cfg, SASRecConfig) else {"head_dim": 8}))
    assert reads_times(small) == reads
    encoder = make_encoder(small).eval()
    x = torch.randn(4, 8)
    position = torch.arange(4)

    def states(time_s: float) -> torch.Tensor:
        times = torch.arange(4, dtype=torch.float64) * time_s
        return encoder(x, SequenceInfo(torch.tensor([0, 4]), 4, position, position, times, times))

    assert torch.equal(states(1.0), states(1e6)) != reads


@pytest.mark.parametrize("cfg", CONFIGS, ids=lambda cfg: f"{cfg.kind}-{getattr(cfg, 'time_channel', '')}")
def test_backbone_kv_cache_spec_matches_heads(cfg):
    spec = cached_forward_of(cfg).cache_spec(cfg)
    assert (spec.num_layers, spec.num_heads) == (3, 2)
    assert spec.head_dim == (6 if isinstance(cfg, SASRecConfig) else 4)


def test_backbone_without_kv_cache_caches_nothing(monkeypatch):
    minimal_spec = BackboneSpec(config=SASRecConfig, build=lambda cfg: nn.Identity())
    monkeypatch.setattr(registry, "backbone_of", lambda cfg: minimal_spec)
    assert not cached_forward_of(SASRecConfig()).has_cache


def test_backbone_missing_spec_fields_are_errors(monkeypatch):
    minimal_spec = BackboneSpec(config=SASRecConfig, build=lambda cfg: nn.Identity())
    monkeypatch.setattr(registry, "backbone_of", lambda cfg: minimal_spec)
    for function, field in ((flops_of, "`flops`"), (activations_of, "`activations`")):
        with pytest.raises(UserError) as raised:
            function(SASRecConfig())
        assert raised.value.remedy is not None
        assert field in raised.value.remedy
    assert not reads_times(SASRecConfig())


def test_backbone_registry_names_match_kinds():
    assert list(BACKBONES)[:3] == ["hstu", "fuxi", "sasrec"]
    assert [BACKBONES.find(name).config().kind for name in list(BACKBONES)[:3]] == ["hstu", "fuxi", "sasrec"]
