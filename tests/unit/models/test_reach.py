"""Attention spans: truncation of later layers, candidates in one pass, and FLOPs."""

import numpy as np
import pytest
import torch

from nestrec.base.config import to_plain
from nestrec.base.config_values import from_plain
from nestrec.base.errors import UserError
from nestrec.models import HSTU, FuXi, FuXiConfig, HSTUConfig, SequenceInfo
from nestrec.models.backbone_registry import flops_of
from nestrec.models.backbone_spec import AttentionSpanConfig
from nestrec.ops.attention.mask_and_bias import attention_mask
from nestrec_bench.harness.step_flops import step_flops

SIZES = {"dim": 8, "num_layers": 3, "num_heads": 2, "head_dim": 4, "max_length": 40}
MODELS = {
    "hstu": lambda span: HSTU(HSTUConfig(**SIZES, time_bias=True, attention=span)),
    "fuxi": lambda span: FuXi(FuXiConfig(**SIZES, ffn_dim=8, attention=span)),
}
SPANS = [
    AttentionSpanConfig(),
    AttentionSpanConfig(window=5),
    AttentionSpanConfig(window=4, num_prefix_tokens=3, num_full_layers=1),
    AttentionSpanConfig(window=6, num_prefix_tokens=2, truncate_to=10, truncate_from_layer=2, truncate_step=4),
]


def make(kind, span):
    torch.manual_seed(0)
    return MODELS[kind](span).double().eval()


def info_of(lengths, first=0, **more):
    position = torch.cat([torch.arange(first, first + n) for n in lengths])
    time = position.double() * 1000.0
    return SequenceInfo(
        offsets=torch.tensor([0, *np.cumsum(lengths)]),
        max_length=max(lengths),
        position_T=position,
        token_key_T=position,
        time_T=time,
        query_time_T=time + 7.0,
        **more,
    )


@pytest.mark.parametrize("kind", MODELS)
def test_attention_span_truncates_later_layers(kind):
    span = AttentionSpanConfig(window=6, num_prefix_tokens=2, truncate_to=10, truncate_step=4)
    model = make(kind, span)
    lengths = [3, 13, 14, 37]
    cuts = [0, 0, 4, 24]
    x = torch.randn(sum(lengths), 8, dtype=torch.float64)
    found = model(x, info_of(lengths)).split(lengths)
    for length, cut, own, state in zip(lengths, cuts, x.split(lengths), found, strict=True):
        before = model._run_layers(model.layers[:1], own * 8**0.5 + model.position[:length], info_of([length]))
        after = model._run_layers(model.layers[1:], before[cut:], info_of([length - cut], cut))
        torch.testing.assert_close(state, torch.cat([before[:cut], after]), rtol=0, atol=1e-12)
        assert span.cut(length) == cut


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("span", SPANS)
def test_attention_span_candidates_equal_single_passes(kind, span):
    model = make(kind, span)
    history = 17
    num_targets = 3
    x = torch.randn(history + num_targets, 8, dtype=torch.float64)
    cut = torch.tensor([span.cut(history)])
    info = info_of([history + num_targets], num_targets_B=torch.tensor([num_targets]), cut_B=cut)
    for each in (info.position_T, info.time_T, info.query_time_T):
        each[history:] = each[history].clone()
    together = model(x, info)[history:]
    for c in range(num_targets):
        rows = [*range(history), history + c]
        alone = model(x[rows], info_of([history + 1], cut_B=cut))[-1]
        torch.testing.assert_close(together[c], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("span", SPANS)
def test_attention_span_flops_count_computed_tokens_and_pairs(kind, span):
    cfg = make(kind, span).cfg
    lengths = np.array([1, 9, 26, 40])
    flops, plain = flops_of(cfg), flops_of(make(kind, AttentionSpanConfig()).cfg)
    tokens, pairs = 0, 0
    for layer in range(3):
        num_tokens = [int(n) - (span.cut(int(n)) if span.truncates(layer) else 0) for n in lengths]
        tokens += sum(num_tokens)
        pairs += sum(int(attention_mask(torch.tensor([0, n]), n, span.rules(layer)).sum()) for n in num_tokens)
    assert flops.total(lengths) == pytest.approx((plain.token * tokens + (plain.pair + plain.channel_pair) * pairs) / 3)
    step = step_flops(cfg, lengths)
    assert step.projections == pytest.approx(plain.token * tokens)
    assert step.attention == pytest.approx((3.5 * plain.pair + 3.0 * plain.channel_pair) * pairs / 3)


def test_attention_span_window_cost_is_linear_in_length():
    """Planning and batch balancing use these length coefficients."""
    lengths = np.linspace(4_000, 60_000, 40)
    full, local = (
        flops_of(HSTUConfig(num_layers=4, attention=span))
        for span in (AttentionSpanConfig(), AttentionSpanConfig(window=1024))
    )
    assert full.length_coefficients(lengths) == (full.token, full.pair / 2)
    linear, squared = local.length_coefficients(lengths)
    exact = np.array([local.total(np.array([round(n)])) for n in lengths])
    np.testing.assert_allclose(linear * lengths + squared * lengths**2, exact, rtol=0.15)
    assert squared * 60_000 < 0.05 * linear


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_prefix_tokens": 3}, "attention.num_prefix_tokens=3: does nothing without a window"),
        ({"num_full_layers": 1}, "attention.num_full_layers=1: does nothing"),
        (
            {"window": 3, "num_full_layers": 2},
            "attention.num_full_layers=2: must be less than the number of layers, which is 2",
        ),
        ({"truncate_to": 3, "truncate_from_layer": 2}, "attention.truncate_from_layer=2: must be less than"),
        ({"window": 0}, "window=0"),
    ],
)
@pytest.mark.parametrize("cls", [HSTUConfig, FuXiConfig])
def test_attention_span_rejects_options_without_effect(cls, options, message):
    with pytest.raises(UserError, match=message):
        from_plain(cls, {"attention": options})


@pytest.mark.parametrize("cls", [HSTUConfig, FuXiConfig])
def test_attention_span_old_config_is_full_attention(cls):
    plain = to_plain(cls())
    for added in ("attention", "time_encoding"):
        del plain[added]
    assert from_plain(cls, plain) == cls()
