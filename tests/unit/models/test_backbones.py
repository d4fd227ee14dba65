"""Every backbone says of itself what is true of its model; what one does not say is refused by name."""

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
def test_flops_of_a_token_are_twice_the_weights_it_is_multiplied_with(cfg):
    """Positions, norms and biases are added, not multiplied; everything else of a layer is a matrix."""
    layers = make_encoder(cfg).layers
    matrices = sum(p.numel() for p in layers.parameters() if p.ndim == 2)
    assert flops_of(cfg).token == 2 * matrices


@pytest.mark.parametrize("cfg", CONFIGS, ids=lambda cfg: f"{cfg.kind}-{getattr(cfg, 'time_channel', '')}")
def test_flops_of_lengths_are_sums_over_tokens_and_causal_pairs(cfg):
    flops = flops_of(cfg)
    pairs = sum(1 for length in (3, 5) for i in range(length) for j in range(i + 1))
    assert flops.of(np.array([3, 5])) == 8 * flops.token + pairs * (flops.pair + flops.channel_pair)
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
def test_a_backbone_says_whether_it_reads_times(cfg, reads):
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
def test_every_backbone_of_ours_keeps_keys_and_values_of_its_heads(cfg):
    kept = cached_forward_of(cfg).kept(cfg)
    assert (kept.num_layers, kept.num_heads) == (3, 2)
    assert kept.head_dim == (6 if isinstance(cfg, SASRecConfig) else 4)


def test_a_backbone_that_says_nothing_of_prefixes_keeps_none(monkeypatch):
    silent = BackboneSpec(config=SASRecConfig, build=lambda cfg: nn.Identity())
    monkeypatch.setattr(registry, "backbone_of", lambda cfg: silent)
    assert not cached_forward_of(SASRecConfig()).keeps


def test_what_a_backbone_does_not_say_is_not_guessed(monkeypatch):
    silent = BackboneSpec(config=SASRecConfig, build=lambda cfg: nn.Identity())
    monkeypatch.setattr(registry, "backbone_of", lambda cfg: silent)
    for question, what in ((flops_of, "`flops`"), (activations_of, "`activations`")):
        with pytest.raises(UserError) as raised:
            question(SASRecConfig())
        assert raised.value.remedy is not None
        assert what in raised.value.remedy
    assert not reads_times(SASRecConfig())


def test_the_entries_are_what_their_kinds_say():
    assert list(BACKBONES)[:3] == ["hstu", "fuxi", "sasrec"]
    assert [BACKBONES.find(name).config().kind for name in list(BACKBONES)[:3]] == ["hstu", "fuxi", "sasrec"]
