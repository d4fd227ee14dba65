"""How far attention reaches: what a cut leaves, candidates in one pass, and what it all costs."""

import numpy as np
import pytest
import torch

from nestrec.base.config import to_plain
from nestrec.base.config_values import from_plain
from nestrec.base.errors import UserError
from nestrec.models import HSTU, FuXi, FuXiConfig, HSTUConfig, SequenceInfo
from nestrec.models.backbone_registry import flops_of
from nestrec.models.backbone_spec import AttentionSpanConfig
from nestrec.ops.attention.mask_and_bias import seen_mask
from nestrec_bench.harness.step_flops import step_flops

SIZES = {"dim": 8, "num_layers": 3, "num_heads": 2, "head_dim": 4, "max_length": 40}
MODELS = {
    "hstu": lambda reach: HSTU(HSTUConfig(**SIZES, time_bias=True, attention=reach)),
    "fuxi": lambda reach: FuXi(FuXiConfig(**SIZES, ffn_dim=8, attention=reach)),
}
REACHES = [
    AttentionSpanConfig(),
    AttentionSpanConfig(window=5),
    AttentionSpanConfig(window=4, prefix=3, full_layers=1),
    AttentionSpanConfig(window=6, prefix=2, keep_last=10, keep_from=2, keep_step=4),
]


def make(kind, reach):
    torch.manual_seed(0)
    return MODELS[kind](reach).double().eval()


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
def test_a_cut_leaves_the_last_tokens_to_the_layers_behind_it(kind):
    reach = AttentionSpanConfig(window=6, prefix=2, keep_last=10, keep_step=4)
    model = make(kind, reach)
    lengths = [3, 13, 14, 37]
    cuts = [0, 0, 4, 24]
    x = torch.randn(sum(lengths), 8, dtype=torch.float64)
    found = model(x, info_of(lengths)).split(lengths)
    for length, cut, own, state in zip(lengths, cuts, x.split(lengths), found, strict=True):
        before = model._through(model.layers[:1], own * 8**0.5 + model.position[:length], info_of([length]))
        behind = model._through(model.layers[1:], before[cut:], info_of([length - cut], cut))
        torch.testing.assert_close(state, torch.cat([before[:cut], behind]), rtol=0, atol=1e-12)
        assert reach.cut(length) == cut


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("reach", REACHES)
def test_candidates_in_one_pass_are_as_in_one_each(kind, reach):
    model = make(kind, reach)
    history = 17
    num_targets = 3
    x = torch.randn(history + num_targets, 8, dtype=torch.float64)
    cut = torch.tensor([reach.cut(history)])
    info = info_of([history + num_targets], num_targets_B=torch.tensor([num_targets]), cut_B=cut)
    for each in (info.position_T, info.time_T, info.query_time_T):
        each[history:] = each[history].clone()
    together = model(x, info)[history:]
    for c in range(num_targets):
        rows = [*range(history), history + c]
        alone = model(x[rows], info_of([history + 1], cut_B=cut))[-1]
        torch.testing.assert_close(together[c], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("reach", REACHES)
def test_flops_are_those_of_tokens_and_pairs_that_are_computed(kind, reach):
    cfg = make(kind, reach).cfg
    lengths = np.array([1, 9, 26, 40])
    flops, plain = flops_of(cfg), flops_of(make(kind, AttentionSpanConfig()).cfg)
    tokens, pairs = 0, 0
    for layer in range(3):
        left = [int(n) - (reach.cut(int(n)) if reach.cuts(layer) else 0) for n in lengths]
        tokens += sum(left)
        pairs += sum(int(seen_mask(torch.tensor([0, n]), n, reach.rules(layer)).sum()) for n in left)
    assert flops.of(lengths) == pytest.approx((plain.token * tokens + (plain.pair + plain.channel_pair) * pairs) / 3)
    step = step_flops(cfg, lengths)
    assert step.projections == pytest.approx(plain.token * tokens)
    assert step.attention == pytest.approx((3.5 * plain.pair + 3.0 * plain.channel_pair) * pairs / 3)


def test_costs_of_a_length_grow_with_it_and_not_with_its_square():
    """What plans and balanced batches count with."""
    lengths = np.linspace(4_000, 60_000, 40)
    whole, local = (
        flops_of(HSTUConfig(num_layers=4, attention=reach))
        for reach in (AttentionSpanConfig(), AttentionSpanConfig(window=1024))
    )
    assert whole.of_length(lengths) == (whole.token, whole.pair / 2)
    linear, squared = local.of_length(lengths)
    exact = np.array([local.of(np.array([round(n)])) for n in lengths])
    np.testing.assert_allclose(linear * lengths + squared * lengths**2, exact, rtol=0.15)
    assert squared * 60_000 < 0.05 * linear


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"prefix": 3}, "attention.prefix=3: means nothing without a window"),
        ({"full_layers": 1}, "attention.full_layers=1: means nothing"),
        ({"window": 3, "full_layers": 2}, "attention.full_layers=2: leaves none of 2 layers"),
        ({"keep_last": 3, "keep_from": 2}, "attention.keep_from=2: leaves none"),
        ({"window": 0}, "window = 0"),
    ],
)
@pytest.mark.parametrize("cls", [HSTUConfig, FuXiConfig])
def test_options_that_would_do_nothing_are_refused(cls, options, named):
    with pytest.raises(UserError, match=named):
        from_plain(cls, {"attention": options})


@pytest.mark.parametrize("cls", [HSTUConfig, FuXiConfig])
def test_a_config_of_before_reads_as_full_attention(cls):
    plain = to_plain(cls())
    for added in ("attention", "time_encoding"):
        del plain[added]
    assert from_plain(cls, plain) == cls()
