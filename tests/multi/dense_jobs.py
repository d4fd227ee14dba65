"""What ranks do in the tests of dense sums that begin inside the backward pass."""

import itertools
import os
import time
from dataclasses import replace
from typing import Any

import torch
from schedule_jobs import Job, batches_of, regrouped, tables_of, tiny_loss, train
from torch import nn

from nestrec.distributed import GradientReducer, Topology
from nestrec.distributed.topology import ParallelConfig
from nestrec.embedding import EmbeddingEngine
from nestrec.models.hstu import HSTUConfig
from nestrec.models.sequence import SequenceInfo
from nestrec.pipeline import LearningRates, LookaheadIterator, PipelineCore, TrainingStep
from nestrec.pipeline.dense.dense_optimizer import DenseOptimizer, OptimizerConfig
from nestrec.pipeline.dense.fsdp_layers import FSDPLayers
from nestrec.pipeline.exchange_window import LossCompute

THREE_BUCKETS = ParallelConfig(dense_bucket_mib=3e-5)
"""Of the weights of `Tiny`: two that can be summed early, and the last."""
_PATIENCE_S = 60.0


def train_late_and_early(topology: Topology, schedules: list[str], job: Job) -> list[list[dict[str, Any]]]:
    """For each schedule what it gives with early sums and without; spans stay where they are."""
    late = replace(job, ranks=replace(job.ranks, dense_overlap=False))
    results = [[train(topology, name, j) for j in (job, late)] for name in schedules]
    return [[{k: v for k, v in r.items() if k != "spans"} for r in pair] for pair in results]


class Pause(torch.autograd.Function):
    """Its backward pass goes on when somebody has seen enough."""

    @staticmethod
    def forward(ctx, x, go_on):
        ctx.go_on = go_on
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.go_on()
        return gradient, None


def wait_for_sum(dense: DenseOptimizer, bytes_before: int) -> None:
    """Until more bytes than before have been summed over all ranks; called inside a backward pass."""
    deadline = time.monotonic() + _PATIENCE_S
    while dense._sync.bytes_reduced <= bytes_before:
        assert time.monotonic() < deadline, "the sum of the last layer waits for the end of the backward pass"
        time.sleep(1e-3)


class _Paused(nn.Module):
    """`Tiny` with a stop between the gradients of its last layer and those of its first."""

    def __init__(self, go_on) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.mix, self.out = nn.Linear(8, 8), nn.Linear(8, 1)
        self._go_on = go_on

    def forward(self, history: torch.Tensor, target: torch.Tensor, user: torch.Tensor) -> torch.Tensor:
        state = Pause.apply(self.mix(history).mean(1) + user, self._go_on)
        return self.out(state * target).sin().sum()


def spans_of_paused_backward(topology: Topology, schedule: str) -> list[Any]:
    """Spans of a step whose last backward pass does not end before the first bucket is summed over all ranks."""
    topology = regrouped(topology, THREE_BUCKETS)
    job = Job(num_steps=1, num_micro_batches=2, num_samples=4 * topology.world)
    passes = itertools.count(1)

    def go_on() -> None:
        if next(passes) == job.num_micro_batches:
            wait_for_sum(dense, 0)

    model = _Paused(go_on)
    engine = EmbeddingEngine(tables_of(job), topology)
    dense = DenseOptimizer(model, OptimizerConfig(), topology, topology.device)
    pipeline = PipelineCore.build(LossCompute(tiny_loss(model), topology.device), engine, dense, schedule)
    feed = LookaheadIterator(batches_of(job, topology, 1))
    pipeline.schedule.advance(
        TrainingStep(number=1, batch=next(feed), rates=LearningRates(dense=0.1, tables=0.1), is_fence=True), feed
    )
    pipeline.close()
    return pipeline.tracer.take()


def gradient_in_two_parts(topology: Topology) -> None:
    """A backward pass inside a backward pass can add to a gradient once more; here two passes do."""
    layers = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    sync = GradientReducer(layers, topology.dense, bucket_bytes=4, begins_early=True)
    with sync.early_sums(lambda collective: None):
        for _ in range(2):
            layers[1].sum().backward()


class _TwoLayers(nn.Module):
    """Layers that can be sliced."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.cfg = HSTUConfig(dim=4)

    def forward(self, token_TD: torch.Tensor, info: SequenceInfo) -> torch.Tensor:
        for layer in self.layers:
            token_TD = layer(token_TD)
        return token_TD


def die_in_pass(topology: Topology) -> None:
    """The last rank dies in the backward pass of sliced layers, when the gradients of the last layer are there."""
    model = nn.ModuleDict({"encoder": (encoder := _TwoLayers())})
    layers = FSDPLayers(model, topology)
    layers.empty_pass()
    if topology.rank == topology.world - 1:
        encoder.layers[0].register_full_backward_pre_hook(lambda *_: os._exit(9))
    layers.empty_pass()
