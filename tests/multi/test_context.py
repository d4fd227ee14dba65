"""Context parallelism is bitwise identical to its reference implementation and close to attention on full sequences."""

from typing import Any

import numpy as np
import pytest
import torch
from context_jobs import KINDS, NORMALIZER, Case, CustomModel, Kind, attention, train_custom_model
from long_history import one_pass

import nestrec
from nestrec.base.errors import UserError
from nestrec.distributed import Topology
from nestrec.distributed.context_ring import ContextRing
from nestrec.jagged import offsets_of
from nestrec.ops.attention.bias_only import bias_attention_reference
from nestrec.ops.attention.hstu_attention import hstu_attention_reference
from nestrec.ops.attention.softmax_attention import softmax_attention_reference
from nestrec.ops.context_parallel.ring_attention import ChannelSums, SiluSum
from nestrec.ops.context_parallel.ring_sum import ring_sum_reference
from nestrec.pipeline.schedule_spec import PipelineConfig

pytestmark = pytest.mark.timeout(300)

_DRAW = np.random.default_rng(5)
LENGTHS = [[1], [0, 2, 0], [3, 1, 7], [64, 5, 33, 1], *(_DRAW.integers(0, 40, 5).tolist() for _ in range(6))]
"""Lengths shorter than the group, lengths that are not divisible, empty sequences and empty parts."""


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("kind", KINDS)
def test_context_parallel_equals_reference_and_full_sequences(pools, world: int, kind: Kind) -> None:
    ranks = pools[world].run(attention, kind, LENGTHS)
    for number, lengths in enumerate(LENGTHS):
        case = Case(kind, lengths, world)
        parts = [rank[number] for rank in ranks]
        if kind != "sasrec":  # the reference has its two sums, but not their quotient
            for part, expected in zip(parts, reference_of_parts(case), strict=True):
                assert all(torch.equal(a, b) for a, b in zip(part, expected, strict=True)), (lengths, kind)
        for value, expected in zip(join_parts(case, parts), attention_of_full_sequences(case), strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_context_parallel_trains_custom_model(pools, world: int) -> None:
    alone = train_custom_model(Topology.single(), "serial", 6)
    assert alone[-1] < alone[0]
    losses = {schedule: pools[world].run(train_custom_model, schedule, 6) for schedule in ("serial", "nested")}
    for ranks in losses.values():
        assert all(rank == ranks[0] for rank in ranks)
        np.testing.assert_allclose(ranks[0], alone, rtol=1e-5)
    assert losses["serial"] == losses["nested"]


def test_context_parallel_divides_activations(pools) -> None:
    alone = one_pass(Topology.single(), 256, 1)
    for rank in pools[2].run(one_pass, 256, 1):
        assert 2 * rank["saved"] < 1.02 * alone["saved"]
        assert rank["sent"] > 0
        torch.testing.assert_close(rank["sums"], alone["sums"], rtol=1e-4, atol=1e-5)


class _RingOfTwo(ContextRing):
    def __init__(self) -> None:
        self.rank, self.size = 0, 2


@pytest.mark.parametrize(
    ("more", "option"),
    [
        ({}, "weight"),
        ({"weight": lambda batch: 1.0, "schedule": PipelineConfig(clustering="greedy")}, "pipeline.clustering"),
    ],
)
def test_context_parallel_pipeline_names_requirements(more: dict[str, Any], option: str) -> None:
    ring = _RingOfTwo()
    tables = [nestrec.Table("items", rows=50, dim=6, features=("item",))]
    with pytest.raises(UserError, match=option):
        nestrec.TrainingPipeline(CustomModel(ring), tables, context=ring, device="cpu", **more)


def reference_of_parts(case: Case) -> list[list[torch.Tensor]]:
    """Return the results and gradients of each part, computed by `ring_sum_reference`."""
    indices = [case.indices(part) for part in range(case.parts.size)]
    biases = [case.bias(case.tables, index) for index in indices]
    queries = [
        {"q": case.q[index]} | ({} if bias.query_time_T is None else {"query_time": bias.query_time_T})
        for index, bias in zip(indices, biases, strict=True)
    ]
    keys = [
        {"k": case.k[index], "v": case.v[index]} | ({} if bias.time_T is None else {"time": bias.time_T})
        for index, bias in zip(indices, biases, strict=True)
    ]
    function = ChannelSums(NORMALIZER, case.rules, 3) if case.kind == "fuxi" else SiluSum(NORMALIZER, case.rules)
    out_gradients = [case.grad[index] for index in indices]
    sums, gradients = ring_sum_reference(function, case.parts, queries, keys, case.tables, out_gradients)
    return [
        [out, gradient.queries["q"], gradient.keys["k"], gradient.keys["v"], *gradient.parameters.values()]
        for out, gradient in zip(sums, gradients, strict=True)
    ]


def join_parts(case: Case, parts: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Return the values of all tokens in order; gradients of tables are summed over ranks, like dense gradients."""
    order = torch.cat([case.indices(part) for part in range(case.parts.size)]).argsort()
    token_values = [torch.cat([rank[i] for rank in parts])[order] for i in range(4)]
    return token_values + [torch.stack([rank[i] for rank in parts]).sum(0) for i in range(4, len(parts[0]))]


def attention_of_full_sequences(case: Case) -> list[torch.Tensor]:
    offsets = offsets_of(torch.from_numpy(case.parts.lengths))
    q, k, v = (x.requires_grad_() for x in (case.q, case.k, case.v))
    tables = {name: table.requires_grad_() for name, table in case.tables.items()}
    bias = case.bias(tables, torch.arange(len(q)))
    if case.kind == "sasrec":
        out = softmax_attention_reference(q, k, v, offsets)
    elif case.kind == "fuxi":
        semantic = hstu_attention_reference(q, k, v, offsets, normalizer=NORMALIZER).flatten(1)
        out = torch.stack([semantic, *bias_attention_reference(v.flatten(1), offsets, bias)], dim=1)
    else:
        out = hstu_attention_reference(q, k, v, offsets, normalizer=NORMALIZER, bias=bias, rules=case.rules)
    return [out.detach(), *torch.autograd.grad(out, [q, k, v, *tables.values()], case.grad)]
