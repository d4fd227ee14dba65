"""Jobs of ranks in the tests of dense all-reduces that overlap the backward pass."""

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

THREE_BUCKETS = ParallelConfig(grad_bucket_mib=3e-5)
"""Options with which the weights of `Tiny` form three buckets: two can be reduced early, and the last cannot."""
_TIMEOUT_S = 60.0


def train_late_and_early(topology: Topology, schedules: list[str], job: Job) -> list[list[dict[str, Any]]]:
    """Return the results of each schedule with and without overlap, except for the spans."""
    late = replace(job, ranks=replace(job.ranks, overlap_grad_reduce=False))
    results = [[train(topology, name, j) for j in (job, late)] for name in schedules]
    return [[{k: v for k, v in r.items() if k != "spans"} for r in pair] for pair in results]


class Pause(torch.autograd.Function):
    """Identity whose backward pass calls `wait` before it continues."""

    @staticmethod
    def forward(ctx, x, wait):
        ctx.wait = wait
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.wait()
        return gradient, None


def wait_for_sum(dense: DenseOptimizer, bytes_before: int) -> None:
    """Wait inside a backward pass until more bytes than `bytes_before` have been summed over all ranks."""
    deadline = time.monotonic() + _TIMEOUT_S
    while dense._sync.bytes_reduced <= bytes_before:
        assert time.monotonic() < deadline, "the sum of the last layer waits for the end of the backward pass"
        time.sleep(1e-3)


class _PausingModel(nn.Module):
    """A variant of `Tiny` with a pause between the gradients of its last layer and those of its first."""

    def __init__(self, wait) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.mix, self.out = nn.Linear(8, 8), nn.Linear(8, 1)
        self._wait = wait

    def forward(self, history: torch.Tensor, target: torch.Tensor, user: torch.Tensor) -> torch.Tensor:
        state = Pause.apply(self.mix(history).mean(1) + user, self._wait)
        return self.out(state * target).sin().sum()


def spans_of_paused_backward(topology: Topology, schedule: str) -> list[Any]:
    """Return the spans of a step whose last backward pass waits until the first bucket is summed over all ranks."""
    topology = regrouped(topology, THREE_BUCKETS)
    job = Job(num_steps=1, num_micro_batches=2, num_samples=4 * topology.world)
    passes = itertools.count(1)

    def wait_in_last_pass() -> None:
        if next(passes) == job.num_micro_batches:
            wait_for_sum(dense, 0)

    model = _PausingModel(wait_in_last_pass)
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
    """Add to a gradient twice by two backward passes, as a nested backward pass can do."""
    layers = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    sync = GradientReducer(layers, topology.dense, bucket_bytes=4, overlaps_backward=True)
    with sync.overlap_backward(lambda collective: None):
        for _ in range(2):
            layers[1].sum().backward()


class _TwoLayers(nn.Module):
    """An encoder with layers that FSDP can shard."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.cfg = HSTUConfig(dim=4)

    def forward(self, token_TD: torch.Tensor, info: SequenceInfo) -> torch.Tensor:
        for layer in self.layers:
            token_TD = layer(token_TD)
        return token_TD


def die_in_pass(topology: Topology) -> None:
    """Exit the last rank in the backward pass of FSDP layers, after the gradients of the last layer."""
    model = nn.ModuleDict({"encoder": (encoder := _TwoLayers())})
    layers = FSDPLayers(model, topology)
    layers.empty_pass()
    if topology.rank == topology.world - 1:
        encoder.layers[0].register_full_backward_pre_hook(lambda *_: os._exit(9))
    layers.empty_pass()
