"""What a rank does in the measured part of `nestrec bench balance`: a small HSTU, driven step by step.

The measured part of `nestrec bench balance`: a small HSTU trained by real ranks, policies taking turns on a batch.

Every global batch is trained on once under each policy, in alternating order, so that policies meet the same batches
and the same disturbances; figures are medians. Waiting at a collective is what a rank spends in it beyond the last rank
to enter. Where ranks share cores, wall times say little of waiting: a rank that waits lends its core to others. So the
processor time of forward and backward passes is reported too, which does not depend on who else runs.
"""

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from nestrec.balance import BalanceConfig, CostModel
from nestrec.balance.balance_metrics import imbalance, straggler, waiting
from nestrec.balance.cost import CostModelHistory, fit_sums
from nestrec.balance.sample_exchange import make_dealer
from nestrec.base.config import config, to_plain
from nestrec.base.config_values import from_plain
from nestrec.base.thread_team import usable_cores
from nestrec.data.batch_loader import BatchConfig, BatchLoader, MicroBatch
from nestrec.data.batch_order import BatchPosition, GlobalBatchSampler
from nestrec.data.dataset import Dataset
from nestrec.data.samples.retrieval_collator import HistoryConfig
from nestrec.data.synthetic.synthetic_logs import generate, preset
from nestrec.distributed import Topology
from nestrec.distributed.collectives import all_gather_json, barrier
from nestrec.distributed.topology import Communicator
from nestrec.models import HSTUConfig
from nestrec.pipeline import Coupling, LearningRates, LookaheadIterator, ModelCompute, PipelineCore, TrainingStep
from nestrec.tasks.retrieval_task import RetrievalTaskConfig
from nestrec.tasks.task import compute_of
from nestrec.trace import Span, Tracer
from nestrec.trace.tracer import CollectiveLog
from nestrec.training.run_config import DataConfig, RunConfig, TrainingConfig
from nestrec.training.training_session import Session
from nestrec_bench.harness.local_ranks import run_on_ranks

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

    def __init__(self, inner: ModelCompute):
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
        wall = time.perf_counter()
        cpu = time.thread_time()
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
    warm = job.feed(BalanceConfig(policy=bench.policies[0]), CostModel(), BatchPosition(), Tracer())
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
    pipeline: PipelineCore
    number: int = 0
    position: BatchPosition = field(default_factory=BatchPosition)
    """behind the last batch that was trained on"""
    order: GlobalBatchSampler | None = None

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
        pipeline = PipelineCore.build(compute, session.engine, session.dense, tracer=Tracer())
        return BalanceJob(bench, session, compute, pipeline)

    def feed(self, cfg: BalanceConfig, cost: CostModel, start: BatchPosition, tracer: Tracer) -> LookaheadIterator:
        session = self.session
        dealer = make_dealer(cfg, CostModelHistory(cost), own_communicator(session.topology), tracer)
        batches = BatchLoader(session.task.assembler, session.cfg.batch, seed=self.bench.seed, dealer=dealer)
        self.order = batches.order
        return LookaheadIterator(batches.starting_at(start))

    def step(self, feed: LookaheadIterator) -> dict[str, Any]:
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
        step = TrainingStep(number=self.number, batch=batch, rates=LearningRates(dense=1e-3, tables=1e-3))
        start_s = time.perf_counter()
        self.pipeline.schedule.advance(step, feed)
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


Row = dict[str, Any]
Floats = NDArray[np.float64]
FIGURES = ("step_s", "compute_s", "cpu_s", "data_wait_s")


def measure(bench: MeasuredBench) -> list[Row]:
    """A row for each policy, measured in one run of `bench.ranks` processes."""
    with tempfile.TemporaryDirectory(prefix="nestrec-balance-") as folder:
        data = bench.lengths if Path(bench.lengths).is_dir() else str(Path(folder) / "data")
        if not Path(bench.lengths).is_dir():
            num_samples = bench.ranks * bench.batch * (bench.rounds + bench.fit_rounds)
            generate(preset(bench.lengths, num_users=num_samples, num_items=bench.num_items), Path(data))
        ranks = run_on_ranks(bench.ranks, measure_rank, to_plain(bench), data)
    baseline = _table(ranks, bench.policies[0])
    return [_row(bench, policy, ranks, baseline) for policy in bench.policies]


def _table(ranks: Sequence[Mapping[str, Any]], policy: str) -> dict[str, Floats]:
    """(R, S) of each figure, and (S,) the mean over ranks of the time waited at collectives."""
    table = {name: np.array([[s[name] for s in rank["steps"][policy]] for rank in ranks]) for name in FIGURES}
    num_ranks, num_steps = table["step_s"].shape
    waited = np.zeros(num_steps)
    for step in range(num_steps):
        for name in COMMUNICATORS:
            durations = [rank["steps"][policy][step]["durations_ns"][name] for rank in ranks]
            waited[step] += waiting(durations, [range(num_ranks)]).sum() * 1e-9
    return {**table, "waited_s": waited}


def _row(bench: MeasuredBench, policy: str, ranks: Sequence[Mapping[str, Any]], baseline: Mapping[str, Floats]) -> Row:
    table = _table(ranks, policy)
    first = ranks[0]
    steps = first["steps"][policy]
    step_s, cpu_max = table["step_s"].mean(axis=0), table["cpu_s"].max(axis=0)
    speedup = baseline["step_s"].mean(axis=0) / step_s
    speedup_cpu = baseline["cpu_s"].max(axis=0) / cpu_max
    idle = [straggler(busy, float(whole)) for busy, whole in zip(table["compute_s"].T, step_s, strict=True)]
    return {
        "policy": policy,
        "lengths": bench.lengths,
        "ranks": bench.ranks,
        "batch": bench.batch,
        "measured": True,
        "noise": "real",
        "cores": usable_cores(),
        "mode": bench.mode,
        "rounds": bench.rounds,
        "cost": first["cost"],
        **_spread("imbalance", table["waited_s"] / step_s),
        **_spread("straggler", idle),
        **_spread("cpu_imbalance", [imbalance(busy) for busy in table["cpu_s"].T]),
        **_spread("step_ms", step_s * 1e3),
        **_spread("compute_cpu_max_ms", cpu_max * 1e3),
        **_spread("speedup", speedup),
        **_spread("speedup_cpu", speedup_cpu),
        **_spread("data_wait_ms", table["data_wait_s"].mean(axis=0) * 1e3),
        "max_token_gap": float(np.mean([step["max_token_gap"] for step in steps])),
        "predicted_imbalance": float(np.mean([step["predicted_imbalance"] for step in steps])),
        "moved_bytes": float(np.mean([step["moved_bytes"] for step in steps])),
        **first["data"][policy],
    }


def _spread(name: str, values: Sequence[float] | Floats) -> Row:
    """Median and quartiles."""
    low, middle, high = np.percentile(np.asarray(values, dtype=np.float64), [25, 50, 75]).tolist()
    return {name: middle, f"{name}_quartiles": [low, high]}
