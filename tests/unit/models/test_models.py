"""Encoders: the result of a sample does not depend on its batch, and models match their publications."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from nestrec.base.random import as_int64
from nestrec.data.flat_arrays import positions, sample_keys, token_keys
from nestrec.models import DLRM, HSTU, DLRMConfig, FuXi, FuXiConfig, HSTUConfig, SASRec, SASRecConfig, SequenceInfo
from nestrec.models.backbone_spec import AttentionSpanConfig
from nestrec.models.heads import HeadConfig, RankingModel, RetrievalModel, SimilarityConfig

HSTU_CONFIG = HSTUConfig(dim=8, head_dim=4, num_heads=2, max_length=12, dropout=0.3, time_bias=True)
SASREC_CONFIG = SASRecConfig(dim=8, ffn_dim=8, num_heads=2, max_length=12, dropout=0.3)
FUXI_CONFIG = FuXiConfig(dim=8, head_dim=4, num_heads=2, ffn_dim=12, max_length=12, dropout=0.3)
SEMI_LOCAL, TRUNCATED = (
    AttentionSpanConfig(window=3, num_prefix_tokens=2),
    AttentionSpanConfig(truncate_to=4, truncate_step=3),
)
ENCODERS = {
    "hstu": lambda: HSTU(HSTU_CONFIG),
    "fuxi": lambda: FuXi(FUXI_CONFIG),
    "fuxi without times": lambda: FuXi(replace(FUXI_CONFIG, time_channel=False)),
    "fuxi with a function of time": lambda: FuXi(replace(FUXI_CONFIG, time_encoding="functional")),
    "hstu with a function of time": lambda: HSTU(replace(HSTU_CONFIG, time_encoding="functional")),
    "sasrec": lambda: SASRec(SASREC_CONFIG),
    "hstu with a window and a prefix": lambda: HSTU(replace(HSTU_CONFIG, attention=SEMI_LOCAL)),
    "fuxi with a window and a prefix": lambda: FuXi(replace(FUXI_CONFIG, attention=SEMI_LOCAL)),
    "hstu truncated": lambda: HSTU(replace(HSTU_CONFIG, num_layers=3, attention=TRUNCATED)),
    "fuxi truncated": lambda: FuXi(replace(FUXI_CONFIG, num_layers=3, attention=TRUNCATED)),
}


def info_of(lengths, users, *, epoch=0):
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    times = torch.cat([torch.arange(n, dtype=torch.float64) * 100 + u for n, u in zip(lengths, users, strict=True)])
    keys = token_keys(sample_keys(1, epoch, np.array(users)), offsets)
    return SequenceInfo(
        offsets=torch.from_numpy(offsets),
        max_length=max(lengths),
        position_T=torch.from_numpy(positions(offsets)),
        token_key_T=as_int64(keys),
        time_T=times,
        query_time_T=times + 50,
    )


def vectors_of(lengths, users, dim=8):
    rows = [
        torch.randn(n, dim, generator=torch.Generator().manual_seed(u), dtype=torch.float64)
        for n, u in zip(lengths, users, strict=True)
    ]
    return torch.cat(rows)


def encoder_of(kind):
    torch.manual_seed(0)
    return ENCODERS[kind]().double()


@pytest.mark.parametrize("kind", ENCODERS)
def test_encoder_dropout_does_not_depend_on_batch(kind):
    encoder = encoder_of(kind).train()
    lengths, users = [5, 1, 12, 3], [7, 2, 9, 4]
    together = encoder(vectors_of(lengths, users), info_of(lengths, users)).split(lengths)
    for length, user, part in zip(lengths, users, together, strict=True):
        alone = encoder(vectors_of([length], [user]), info_of([length], [user]))
        assert torch.allclose(part, alone, atol=1e-12)


@pytest.mark.parametrize("kind", ENCODERS)
def test_encoder_dropout_depends_on_epoch_and_train_mode(kind):
    encoder = encoder_of(kind).train()
    x = vectors_of([6], [1])
    first, second = (encoder(x, info_of([6], [1], epoch=e)) for e in (0, 1))
    assert not torch.allclose(first, second)
    encoder.eval()
    first, second = (encoder(x, info_of([6], [1], epoch=e)) for e in (0, 1))
    assert torch.equal(first, second)


@pytest.mark.parametrize("kind", ENCODERS)
def test_encoders_are_causal(kind):
    encoder = encoder_of(kind).eval()
    x = vectors_of([6], [1])
    before = encoder(x, info_of([6], [1]))
    x[4:] += 1.0
    after = encoder(x, info_of([6], [1]))
    assert torch.equal(before[:4], after[:4])


def test_hstu_matches_published_configuration():
    cfg = HSTUConfig()
    assert cfg.normalizer(0) == 211
    layer = HSTU(HSTUConfig(time_bias=True)).layers[0]
    names = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    assert names == {
        "uvqk": (50, 200),
        "output.weight": (50, 50),
        "output.bias": (50,),
        "position_table": (421,),
        "time_table": (129,),
    }


def test_hstu_without_attention_is_residual_plus_bias():
    torch.manual_seed(0)
    encoder = HSTU(HSTUConfig(dim=8, head_dim=8, max_length=12, position_bias=False)).double().eval()
    with torch.no_grad():
        for layer in encoder.layers:
            layer.uvqk.zero_()
    x = vectors_of([4], [3])
    expected = x * 8**0.5 + encoder.position[:4] + sum(layer.output.bias for layer in encoder.layers)
    assert torch.allclose(encoder(x, info_of([4], [3])), expected, atol=1e-12)


def test_fuxi_large_has_published_number_of_weights():
    """TurboGR reports 201.55 million weights: 16 blocks, width 1024, 8 heads of 128, without tables and biases."""
    cfg = FuXiConfig(dim=1024, num_heads=8, head_dim=128, ffn_dim=1024, num_layers=1, max_length=8)
    with torch.device("meta"):
        matrices = [p.numel() for p in FuXi(cfg).layers.parameters() if p.dim() == 2]
    assert 16 * sum(matrices) == pytest.approx(201.55e6, rel=2e-3)


@pytest.mark.parametrize(
    "span", [AttentionSpanConfig(), AttentionSpanConfig(window=2, num_prefix_tokens=1)], ids=["full", "semi-local"]
)
def test_fuxi_equals_its_formulas(span):
    """Compares one block and one sequence with explicit sums."""
    torch.manual_seed(0)
    cfg = FuXiConfig(dim=6, head_dim=2, num_heads=2, ffn_dim=5, num_layers=1, max_length=9, attention=span)
    encoder = FuXi(cfg).double().eval()
    block = encoder.layers[0]
    info = info_of([5], [3])
    x = vectors_of([5], [3], dim=6)
    x = x * 6**0.5 + encoder.position[:5]
    u, v, q, k = torch.nn.functional.silu(rms(x) @ block.uvqk).split([12, 4, 4, 4], dim=1)
    channels = torch.zeros(3, 5, 4, dtype=torch.float64)
    for i in range(5):
        for j in range(i + 1) if span.window is None else {0, max(0, i - 1), i}:
            for h in (slice(0, 2), slice(2, 4)):
                channels[0, i, h] += (
                    torch.nn.functional.silu(q[i, h] @ k[j, h]) / (20 if span.window is None else 14) * v[j, h]
                )
            channels[1, i] += block.position_table[19 + j - i] * v[j]
            bucket = int(np.log(max(1.0, abs(float(info.query_time_T[i] - info.time_T[j])))) / 0.301)
            channels[2, i] += block.time_table[bucket] * v[j]
    x = x + block.output(u * rms(torch.cat(list(channels), dim=1)))
    a, b = (rms(x) @ block.up).chunk(2, dim=1)
    x = x + (torch.nn.functional.silu(a) * b) @ block.down
    assert torch.allclose(encoder(vectors_of([5], [3], dim=6), info), x, atol=1e-12)


def rms(x):
    return x / (x.square().mean(dim=1, keepdim=True) + 1e-6).sqrt()


def test_normalized_similarity_is_cosine_over_temperature():
    torch.manual_seed(0)
    model = RetrievalModel(SASREC_CONFIG, SimilarityConfig(normalize=True, temperature=0.1)).double().eval()
    query = model(vectors_of([5], [1]), info_of([5], [1]))
    assert torch.allclose(query.norm(dim=1), torch.full((5,), 10.0, dtype=torch.float64))


def test_ranking_logits_do_not_depend_on_own_action():
    torch.manual_seed(0)
    cfg = HSTUConfig(dim=8, head_dim=4, num_heads=2, max_length=12, time_bias=True)
    model = RankingModel(cfg, HeadConfig(hidden_dims=(8,)), num_tasks=2, num_action_bits=3).double().eval()
    content = vectors_of([5], [1])
    action = torch.tensor([1, 0, 3, 7, 2])
    before = model(content, action, info_of([10], [1]))
    changed = action.clone()
    changed[3] = 0
    after = model(content, changed, info_of([10], [1]))
    assert torch.equal(before[:4], after[:4])
    assert not torch.allclose(before[4], after[4])


def test_dlrm_distinguishes_missing_values_from_zero():
    torch.manual_seed(0)
    model = DLRM(DLRMConfig(num_dense=2, num_categorical=3, dim=4)).double()
    categories = torch.randn(1, 3, 4, dtype=torch.float64)
    zero, missing = (model(torch.tensor([[0.0, v]], dtype=torch.float64), categories) for v in (0.0, float("nan")))
    assert torch.isfinite(missing).all()
    assert not torch.equal(zero, missing)


@pytest.mark.parametrize("has_interactions", [True, False])
def test_head_interactions_distinguish_equal_sums(has_interactions):
    head = HeadConfig(hidden_dims=(8,), interactions=has_interactions)
    model = RankingModel(HSTU_CONFIG, head, num_tasks=2, num_action_bits=3, num_features=3).eval()
    feature_ECD = torch.randn(5, 3, 8)
    moved = feature_ECD + torch.tensor([1.0, -1.0, 0.0])[:, None]
    content_ED = feature_ECD.sum(1)
    action_E = torch.zeros(5, dtype=torch.int64)
    info = info_of([10], [1])
    found, other = (model(content_ED, action_E, info, None, given) for given in (feature_ECD, moved))
    assert torch.equal(found, other) == (not has_interactions)
    if has_interactions:
        a, b, c = feature_ECD.unbind(1)
        expected = torch.stack([(a * b).sum(1), (a * c).sum(1), (b * c).sum(1)], dim=1)
        assert torch.allclose(model.interactions(feature_ECD), expected, atol=1e-5)
