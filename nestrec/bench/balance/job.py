"""What a rank does in the measured part of `nestrec bench balance`: a small HSTU, driven step by step."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from nestrec.balance import BalanceConfig, CostModel
from nestrec.balance.changes import CostSchedule
from nestrec.balance.cost import fit_sums
from nestrec.balance.dealer import make_dealer
from nestrec.base.config import config, from_plain, to_plain
from nestrec.data.batches import BatchConfig, Batches, MicroBatch
from nestrec.data.dataset import Dataset
from nestrec.data.order import GlobalBatches, Position
from nestrec.data.samples.retrieval import HistoryConfig
from nestrec.distributed import Topology
from nestrec.distributed.exchange import all_gather_json, barrier
from nestrec.distributed.topology import Communicator
from nestrec.models import HSTUConfig
from nestrec.pipeline import Compute, Coupling, Feed, Rates, Step, TrainingPipeline
from nestrec.tasks.retrieval import RetrievalTaskConfig
from nestrec.tasks.task import compute_of
from nestrec.trace import Span, Tracer
from nestrec.trace.collective_log import CollectiveLog
from nestrec.training.config import DataConfig, RunConfig, TrainingConfig
from nestrec.training.session import Session

COMMUNICATORS = ("keys", "vectors", "dense")
DATA_SPANS = ("partition", "exchange")


@config
class MeasuredBench:
    """A job in which a step takes a few tenths of a second on one core a rank."""

    lengths: str = "turbogr-kuai"
    """preset of the synthetic dataset, or a prepared one"""
    ranks: int = 4
    """processes that train together"""
    batch: int = 8
    """samples a rank"""
    policies: tuple[str, ...] = ("fixed", "zigzag", "refined")
    """they take turns; the first is the baseline"""
    mode: Literal["read", "exchange"] = "exchange"
    """how samples reach the ranks that compute them"""
    rounds: int = 30
    """global batches, each trained on under every policy"""
    fit_rounds: int = 16
    """global batches before, under the baseline, to which the cost model is fitted"""
    dim: int = 32
    """width of the model, which has one layer and one head"""
    max_length: int = 2048
    """longest sequence that the model sees"""
    num_items: int = 5000
    """rows of the table, where the data are made up"""
    seed: int = 0
    """of data, order and weights"""


class TimedCompute:
    """Forward and backward passes with their wall and processor time."""

    def __init__(self, inner: Compute):
        self._inner = inner
        self.wall_s = self.cpu_s = 0.0

    @property
    def couples_samples(self) -> Coupling:
        return self._inner.couples_samples

    def transfer(self, part: MicroBatch) -> MicroBatch:
        return self._inner.transfer(part)

    def forward_backward(
        self, part: MicroBatch, rows: Mapping[str, torch.Tensor], index: Mapping[str, torch.Tensor], weight: float
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        wall, cpu = time.perf_counter(), time.thread_time()
        result = self._inner.forward_backward(part, rows, index, weight)
        self.wall_s += time.perf_counter() - wall
        self.cpu_s += time.thread_time() - cpu
        return result

    def take(self) -> tuple[float, float]:
        """(wall, processor) seconds since the last call."""
        taken, self.wall_s, self.cpu_s = (self.wall_s, self.cpu_s), 0.0, 0.0
        return taken


def measure_rank(topology: Topology, plain: Mapping[str, Any], data: str) -> dict[str, Any]:
    """What one rank saw: for each policy and step its times and the durations of its collectives."""
    bench = from_plain(MeasuredBench, plain)
    job = BalanceJob.open(bench, topology, data)
    warm = job.feed(BalanceConfig(policy=bench.policies[0]), CostModel(), Position(), Tracer())
    found = [job.step(warm) for _ in range(bench.fit_rounds)]
    warm.close()
    cost = job.fitted(found[len(found) // 3 :])
    start = job.position
    traces = {policy: Tracer() for policy in bench.policies}
    feeds = {p: job.feed(BalanceConfig(policy=p, mode=bench.mode), cost, start, traces[p]) for p in bench.policies}
    steps: dict[str, list[dict[str, Any]]] = {policy: [] for policy in bench.policies}
    for number in range(bench.rounds):
        turn = number % len(bench.policies)
        for policy in (*bench.policies[turn:], *bench.policies[:turn]):
            steps[policy].append(job.step(feeds[policy]))
    for feed in feeds.values():
        feed.close()
    return {"steps": steps, "cost": to_plain(cost), "data": {p: _data_lanes(traces[p].take()) for p in bench.policies}}


@dataclass(slots=True)
class BalanceJob:
    """The parts of a training run, driven step by step."""

    bench: MeasuredBench
    session: Session
    compute: TimedCompute
    pipeline: TrainingPipeline
    number: int = 0
    position: Position = field(default_factory=Position)
    """behind the last batch that was trained on"""
    order: GlobalBatches | None = None

    @staticmethod
    def open(bench: MeasuredBench, topology: Topology, data: str) -> "BalanceJob":
        length = min(int(Dataset.open(data, columns=[]).lengths.max()), bench.max_length)
        # Without the relative bias, whose gradient is a matrix of the longest length for each sample.
        encoder = HSTUConfig(
            dim=bench.dim, head_dim=bench.dim, num_layers=1, max_length=length, position_bias=False, dropout=0.0
        )
        task = RetrievalTaskConfig(encoder=encoder, history=HistoryConfig(max_length=length), num_negatives=8)
        cfg = RunConfig(
            name="balance",
            task=task,
            data=DataConfig(folder=data),
            training=TrainingConfig(seed=bench.seed),
            batch=BatchConfig(batch_samples=bench.ranks * bench.batch, workers=1, prefetch=2),
        )
        session = Session.open(cfg, topology)
        compute = TimedCompute(compute_of(session.task, topology.device, "fp32"))
        pipeline = TrainingPipeline(compute, session.engine, dense_optimizer=session.dense, tracer=Tracer())
        return BalanceJob(bench, session, compute, pipeline)

    def feed(self, cfg: BalanceConfig, cost: CostModel, start: Position, tracer: Tracer) -> Feed:
        session = self.session
        dealer = make_dealer(cfg, CostSchedule(cost), own_communicator(session.topology), tracer)
        batches = Batches(session.task.assembler, session.cfg.batch, seed=self.bench.seed, dealer=dealer)
        self.order = batches.order
        return Feed(batches.starting_at(start))

    def step(self, feed: Feed) -> dict[str, Any]:
        """One step, begun by all ranks together."""
        topology = self.session.topology
        before_s = time.perf_counter()
        batch = next(feed)
        data_wait_s = time.perf_counter() - before_s
        barrier(topology.control)
        for name in COMMUNICATORS:
            topology.log.take_durations_ns(name)
        self.number += 1
        assert self.order is not None
        self.position = self.order.after(batch.position)
        step = Step(number=self.number, batch=batch, rates=Rates(dense=1e-3, tables=1e-3))
        start_s = time.perf_counter()
        self.pipeline.advance(step, feed)
        step_s = time.perf_counter() - start_s
        compute_s, cpu_s = self.compute.take()
        tokens = batch.tokens.astype(np.float64)
        return {
            "step_s": step_s,
            "compute_s": compute_s,
            "cpu_s": cpu_s,
            "data_wait_s": data_wait_s,
            "tokens": float(tokens.sum()),
            "tokens_squared": float(tokens @ tokens),
            **batch.figures,
            "durations_ns": {name: topology.log.take_durations_ns(name) for name in COMMUNICATORS},
        }

    def fitted(self, steps: Sequence[Mapping[str, Any]]) -> CostModel:
        """The cost model that explains the processor times of all ranks in these steps."""
        mine = [[step["cpu_s"], step["tokens"], step["tokens_squared"]] for step in steps]
        every = np.array(all_gather_json(self.session.topology.control, mine)).reshape(-1, 3)
        return fit_sums(*every.T)


def own_communicator(topology: Topology) -> Communicator:
    """All ranks, for one feed alone: each trades samples on a thread of its own. Collective."""
    group = dist.new_group(backend="gloo") if topology.world > 1 else None
    return Communicator("samples", topology.rank, topology.world, group, CollectiveLog())


def _data_lanes(spans: Sequence[Span]) -> dict[str, Any]:
    """Median milliseconds of dealing a batch, and the lanes on which it ran beside the steps."""
    times = {name: [s.duration_ns * 1e-6 for s in spans if s.name == f"train.data.{name}"] for name in DATA_SPANS}
    medians = {f"{name}_ms": float(np.median(values)) for name, values in times.items() if values}
    return {**medians, "data_lanes": sorted({span.lane for span in spans})}
