"""Ranks that hold parts of sequences compute what one process defines, to the bit, and what whole sequences give."""

from typing import Any

import numpy as np
import pytest
import torch
from context_jobs import KINDS, NORMALISER, Case, Kind, OwnModel, attention, train_own_model
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

_DRAWN = np.random.default_rng(5)
LENGTHS = [[1], [0, 2, 0], [3, 1, 7], [64, 5, 33, 1], *(_DRAWN.integers(0, 40, 5).tolist() for _ in range(6))]
"""Shorter than the group, not divisible, with empty sequences and empty parts."""


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_equal_the_definition_to_the_bit_and_whole_sequences_to_rounding(pools, world: int, kind: Kind) -> None:
    ranks = pools[world].run(attention, kind, LENGTHS)
    for number, lengths in enumerate(LENGTHS):
        case = Case(kind, lengths, world)
        found = [rank[number] for rank in ranks]
        if kind != "sasrec":  # its two sums are the definition's; the quotient is not
            for mine, theirs in zip(found, defined(case), strict=True):
                assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)), (lengths, kind)
        for mine, theirs in zip(joined(case, found), whole(case), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_model_of_ones_own_trains_on_parts_of_its_samples(pools, world: int) -> None:
    alone = train_own_model(Topology.single(), "serial", 6)
    assert alone[-1] < alone[0]
    losses = {schedule: pools[world].run(train_own_model, schedule, 6) for schedule in ("serial", "nested")}
    for found in losses.values():
        assert all(rank == found[0] for rank in found)
        np.testing.assert_allclose(found[0], alone, rtol=1e-5)
    assert losses["serial"] == losses["nested"]


def test_a_rank_keeps_its_part_of_the_activations(pools) -> None:
    alone = one_pass(Topology.single(), 256, 1)
    for rank in pools[2].run(one_pass, 256, 1):
        assert 2 * rank["kept"] < 1.02 * alone["kept"]
        assert rank["sent"] > 0
        torch.testing.assert_close(rank["sums"], alone["sums"], rtol=1e-4, atol=1e-5)


class _RingOfTwo(ContextRing):
    def __init__(self) -> None:
        self.rank, self.size = 0, 2


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({}, "weight"),
        ({"weight": lambda batch: 1.0, "schedule": PipelineConfig(clustering="greedy")}, "pipeline.clustering"),
    ],
)
def test_a_pipeline_says_what_parts_of_samples_need(more: dict[str, Any], named: str) -> None:
    ring = _RingOfTwo()
    tables = [nestrec.Table("items", rows=50, dim=6, features=("item",))]
    with pytest.raises(UserError, match=named):
        nestrec.TrainingPipeline(OwnModel(ring), tables, context=ring, device="cpu", **more)


def defined(case: Case) -> list[list[torch.Tensor]]:
    """As `ring_sum_reference` has it, of each part."""
    places = [case.places(part) for part in range(case.parts.size)]
    biases = [case.bias(case.tables, at) for at in places]
    queries = [
        {"q": case.q[at]} | ({} if bias.query_time_T is None else {"query_time": bias.query_time_T})
        for at, bias in zip(places, biases, strict=True)
    ]
    keys = [
        {"k": case.k[at], "v": case.v[at]} | ({} if bias.time_T is None else {"time": bias.time_T})
        for at, bias in zip(places, biases, strict=True)
    ]
    function = ChannelSums(NORMALISER, case.rules, 3) if case.kind == "fuxi" else SiluSum(NORMALISER, case.rules)
    sums, found = ring_sum_reference(function, case.parts, queries, keys, case.tables, [case.grad[at] for at in places])
    return [
        [out, of.queries["q"], of.keys["k"], of.keys["v"], *of.parameters.values()]
        for out, of in zip(sums, found, strict=True)
    ]


def joined(case: Case, found: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Of all tokens in order; gradients of tables are summed over ranks, as dense gradients are."""
    order = torch.cat([case.places(part) for part in range(case.parts.size)]).argsort()
    of_tokens = [torch.cat([rank[i] for rank in found])[order] for i in range(4)]
    return of_tokens + [torch.stack([rank[i] for rank in found]).sum(0) for i in range(4, len(found[0]))]


def whole(case: Case) -> list[torch.Tensor]:
    offsets = offsets_of(torch.from_numpy(case.parts.lengths))
    q, k, v = (x.requires_grad_() for x in (case.q, case.k, case.v))
    tables = {name: table.requires_grad_() for name, table in case.tables.items()}
    bias = case.bias(tables, torch.arange(len(q)))
    if case.kind == "sasrec":
        out = softmax_attention_reference(q, k, v, offsets)
    elif case.kind == "fuxi":
        semantic = hstu_attention_reference(q, k, v, offsets, normaliser=NORMALISER).flatten(1)
        out = torch.stack([semantic, *bias_attention_reference(v.flatten(1), offsets, bias)], dim=1)
    else:
        out = hstu_attention_reference(q, k, v, offsets, normaliser=NORMALISER, bias=bias, rules=case.rules)
    return [out.detach(), *torch.autograd.grad(out, [q, k, v, *tables.values()], case.grad)]
