"""The cached forward pass equals the full forward pass."""

import itertools
from dataclasses import replace

import pytest
import torch

from nestrec.models import FuXiConfig, HSTUConfig, SASRecConfig
from nestrec.models.backbone_registry import backbone_of, cached_forward_of, make_encoder
from nestrec.models.backbone_spec import AttentionSpanConfig
from nestrec.models.sequence import NewTokenSegment, SequenceInfo

LENGTH = 40


SPANS = {
    "everything": AttentionSpanConfig(),
    "a window": AttentionSpanConfig(window=5),
    "a window and a prefix after a full layer": AttentionSpanConfig(window=6, num_prefix_tokens=3, num_full_layers=1),
    "the last tokens": AttentionSpanConfig(truncate_to=6, truncate_step=4),
    "a window, a prefix and the last tokens": AttentionSpanConfig(
        window=4, num_prefix_tokens=2, truncate_to=9, truncate_from_layer=2, truncate_step=1
    ),
}


SIZES = {"dim": 12, "num_layers": 3, "num_heads": 2, "max_length": LENGTH}
FUNCTION = {"time_encoding": "functional"}
HSTUS = {
    f"hstu, {position}{time}": HSTUConfig(**SIZES, head_dim=6, position_bias=bool(position), **changes)
    for position in ("distances and ", "")
    for time, changes in (
        ("buckets", {"time_bias": True}),
        ("function", {"time_bias": True, **FUNCTION}),
        ("no times", {}),
    )
}
FUXIS = {
    f"fuxi, {time}": FuXiConfig(**SIZES, head_dim=6, ffn_dim=10, **changes)
    for time, changes in (("buckets", {}), ("function", FUNCTION), ("no times", {"time_channel": False}))
}
CONFIGS = {
    f"{name}, {span_name}": replace(cfg, attention=span)
    for name, cfg in (HSTUS | FUXIS).items()
    for span_name, span in SPANS.items()
}
CONFIGS["sasrec"] = SASRecConfig(**SIZES, ffn_dim=10)


def make_model(cfg):
    torch.manual_seed(5)
    model = make_encoder(cfg).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


def cached_forward(model, *arguments):
    return cached_forward_of(model.cfg).forward(model, *arguments)


def no_prefix(model):
    spec = cached_forward_of(model.cfg).cache_spec(model.cfg)
    empty = torch.empty(spec.num_heads, 0, spec.head_dim)
    return lambda layer, sequence: (empty, empty)


def cut_of(model, length):
    return backbone_of(model.cfg).cut(model.cfg, length)


def full(model, x, time, query_time, cut=None):
    info = SequenceInfo(
        offsets=torch.tensor([0, len(x)]),
        max_length=len(x),
        position_T=torch.arange(len(x)),
        token_key_T=torch.zeros(len(x), dtype=torch.int64),
        time_T=time,
        query_time_T=query_time,
        cut_B=None if cut is None else torch.tensor([cut]),
    )
    return model(x, info)


def draw_users(seed, lengths):
    generator = torch.Generator().manual_seed(seed)
    users = []
    for length in lengths:
        x = torch.randn(length, 12, generator=generator)
        time = torch.rand(length + 1, generator=generator, dtype=torch.float64).mul(1e6).cumsum(0)
        users.append((x, time[:-1], time[1:]))
    return users


def segment(model, user, prefix, end, **candidates):
    _, time, query_time = user
    return NewTokenSegment(
        prefix_length=prefix,
        num_history=end - prefix,
        time_K=time[:end],
        query_time_S=query_time[prefix:end],
        cut=cut_of(model, len(time)),
        **({"num_candidates": 0} | candidates),
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_cached_forward_step_by_step_equals_full_pass(name):
    model = make_model(CONFIGS[name])
    users = draw_users(1, [1, 7, 23, LENGTH])
    cuts = [[0, 1], [0, 3, 7], [0, 5, 6, 23], [0, 1, 39, 40]]
    stored = [[] for _ in users]
    states = [[] for _ in users]
    for step in range(3):
        active = [b for b in range(len(users)) if step + 1 < len(cuts[b])]
        segments = [segment(model, users[b], cuts[b][step], cuts[b][step + 1]) for b in active]
        x = torch.cat([users[b][0][s.prefix_length : s.length] for b, s in zip(active, segments, strict=True)])

        def prefix(layer, sequence, active=active):
            parts = [kv[layer] for kv in stored[active[sequence]]]
            if not parts:
                return no_prefix(model)(layer, sequence)
            return tuple(torch.cat([p[i] for p in parts]).transpose(0, 1) for i in range(2))

        state, new_kv = cached_forward(model, x, segments, prefix)
        bounds = list(itertools.accumulate([s.num_tokens for s in segments], initial=0))
        for b, (first, end) in zip(active, itertools.pairwise(bounds), strict=True):
            states[b].append(state[first:end])
            stored[b].append([(k[first:end], v[first:end]) for k, v in new_kv])
    worst = max(
        (torch.cat(parts) - full(model, *user)).abs().max().item() for user, parts in zip(users, states, strict=True)
    )
    assert worst <= 1e-5


@pytest.mark.parametrize("name", CONFIGS)
def test_cached_forward_candidates_equal_full_pass(name):
    model = make_model(CONFIGS[name])
    (user,) = draw_users(2, [20])
    candidates = torch.randn(5, 12)
    x = torch.cat([user[0], candidates])
    now_s = float(user[2][-1]) + 12345.0
    state, _ = cached_forward(
        model, x, [segment(model, user, 0, 20, num_candidates=5, candidate_time_s=now_s)], no_prefix(model)
    )
    now = torch.tensor([now_s], dtype=torch.float64)
    for c in range(5):
        expected = full(
            model,
            torch.cat([user[0], candidates[c : c + 1]]),
            torch.cat([user[1], now]),
            torch.cat([user[2], now]),
            cut=cut_of(model, 20),
        )
        torch.testing.assert_close(state[20 + c], expected[-1], rtol=0, atol=1e-5)


def test_cached_forward_time_bias_uses_request_time():
    """The last event is recomputed for each request, because its query time is not known before."""
    model = make_model(HSTUConfig(**SIZES, head_dim=6, time_bias=True))
    (user,) = draw_users(3, [6])
    late = (user[0], user[1], torch.cat([user[2][:-1], user[2][-1:] + 1e7]))
    before = cached_forward(model, user[0], [segment(model, user, 0, 6)], no_prefix(model))[0]
    after = cached_forward(model, late[0], [segment(model, late, 0, 6)], no_prefix(model))[0]
    assert torch.equal(before[:5], after[:5])
    assert not torch.allclose(before[5], after[5])
