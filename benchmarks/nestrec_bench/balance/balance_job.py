"""Measured part of `nestrec bench balance`: real ranks train a small HSTU, with alternating policies.

Each global batch is trained once with each policy, in alternating order, so that all policies see the same batches and
the same disturbances; figures are medians. The waiting time of a rank at a collective is the time that it spends in it
before the last rank enters. If ranks share cores, wall times do not reflect the waiting time well, because a waiting
rank leaves its core to others. Therefore the CPU time of the forward and backward passes is reported too, which does
not depend on other processes.
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
from nestrec.balance.balance_metrics import imbalance, mean_wait_times, straggler
from nestrec.balance.cost import CostModelHistory, fit_sums
from nestrec.balance.sample_exchange import make_partitioner
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
from nestrec.models.heads import NegativesConfig
from nestrec.pipeline import Coupling, LearningRates, LookaheadIterator, ModelCompute, PipelineCore, TrainingStep
from nestrec.tasks.retrieval_task import RetrievalTaskConfig
from nestrec.tasks.task import make_loss_compute
from nestrec.trace import Span, Tracer
from nestrec.trace.tracer import CollectiveLog
from nestrec.training.run_config import DataConfig, RunConfig, TrainingConfig
from nestrec.training.training_session import Session
from nestrec_bench.harness.local_ranks import run_on_ranks

COMMUNICATORS = ("keys", "vectors", "dense")
DATA_SPANS = {"partition": "train.data.balance", "exchange": "train.data.exchange_samples"}
"""Column of the result to the span that it measures."""


@config
class MeasuredBalanceConfig:
    """Options of the measured job. By default, a step takes a few tenths of a second with one core per rank."""

    lengths: str = "turbogr-kuai"
    """Preset of the synthetic dataset, or folder of a prepared dataset."""
    ranks: int = 4
    """Number of ranks, each of which is a process."""
    batch: int = 8
    """Number of samples per rank."""
    policies: tuple[str, ...] = ("fixed", "zigzag", "refined")
    """Policies that are used alternately; the first one is the baseline."""
    mode: Literal["read", "exchange"] = "exchange"
    """How samples reach the ranks that compute them: read from the dataset, or exchanged between ranks."""
    rounds: int = 30
    """Number of global batches, each of which is trained once with every policy."""
    fit_rounds: int = 16
    """Number of preceding global batches, trained with the baseline, to which the cost model is fitted."""
    dim: int = 32
    """Width of the model, which has one layer and one head."""
    max_length: int = 2048
    """Maximum sequence length of the model."""
    num_items: int = 5000
    """Number of rows of the table, if the dataset is synthetic."""
    seed: int = 0
    """Random seed of data, order and weights."""


class TimedCompute:
    """Model computation that measures the wall time and CPU time of its forward and backward passes."""

    def __init__(self, inner: ModelCompute):
        self._inner = inner
        self.wall_s = 0.0
        self.cpu_s = 0.0

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
        """Return the wall time and the CPU time since the last call, in seconds."""
        times = (self.wall_s, self.cpu_s)
        self.wall_s = 0.0
        self.cpu_s = 0.0
        return times


def measure_rank(topology: Topology, plain: Mapping[str, Any], data: str) -> dict[str, Any]:
    """Train on one rank, and return the times and the durations of collectives for each policy and step."""
    bench = from_plain(MeasuredBalanceConfig, plain)
    job = BalanceJob.open(bench, topology, data)
    warm = job.feed(BalanceConfig(policy=bench.policies[0]), CostModel(), BatchPosition(), Tracer())
    fit_steps = [job.step(warm) for _ in range(bench.fit_rounds)]
    warm.close()
    cost = job.fit_cost(fit_steps[len(fit_steps) // 3 :])
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
    """Components of a training run that is driven step by step."""

    bench: MeasuredBalanceConfig
    session: Session
    compute: TimedCompute
    pipeline: PipelineCore
    number: int = 0
    position: BatchPosition = field(default_factory=BatchPosition)
    """Position after the last trained batch."""
    order: GlobalBatchSampler | None = None

    @staticmethod
    def open(bench: MeasuredBalanceConfig, topology: Topology, data: str) -> "BalanceJob":
        length = min(int(Dataset.open(data, columns=[]).lengths.max()), bench.max_length)
        # The relative bias is disabled: its gradient is a matrix of the maximum length for each sample.
        encoder = HSTUConfig(
            dim=bench.dim, head_dim=bench.dim, num_layers=1, max_length=length, position_bias=False, dropout=0.0
        )
        task = RetrievalTaskConfig(
            encoder=encoder, history=HistoryConfig(max_events=length), negatives=NegativesConfig(num_negatives=8)
        )
        cfg = RunConfig(
            name="balance",
            task=task,
            data=DataConfig(folder=data),
            training=TrainingConfig(seed=bench.seed),
            batch=BatchConfig(batch_size=bench.ranks * bench.batch, num_workers=1, prefetch_batches=2),
        )
        session = Session.open(cfg, topology)
        compute = TimedCompute(make_loss_compute(session.task, topology.device, "fp32"))
        pipeline = PipelineCore.build(compute, session.engine, session.dense, tracer=Tracer())
        return BalanceJob(bench, session, compute, pipeline)

    def feed(self, cfg: BalanceConfig, cost: CostModel, start: BatchPosition, tracer: Tracer) -> LookaheadIterator:
        session = self.session
        partitioner = make_partitioner(cfg, CostModelHistory(cost), own_communicator(session.topology), tracer)
        batches = BatchLoader(session.task.collator, session.cfg.batch, seed=self.bench.seed, partitioner=partitioner)
        self.order = batches.order
        return LookaheadIterator(batches.iterate_from(start))

    def step(self, feed: LookaheadIterator) -> dict[str, Any]:
        """Run one training step, which all ranks start at the same time, and return its figures. Collective."""
        topology = self.session.topology
        before_s = time.perf_counter()
        batch = next(feed)
        data_wait_s = time.perf_counter() - before_s
        barrier(topology.control)
        for name in COMMUNICATORS:
            topology.log.take_durations_ns(name)
        self.number += 1
        assert self.order is not None
        self.position = self.order.next_position(batch.position)
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
            **batch.balance_metrics,
            "durations_ns": {name: topology.log.take_durations_ns(name) for name in COMMUNICATORS},
        }

    def fit_cost(self, steps: Sequence[Mapping[str, Any]]) -> CostModel:
        """Fit the cost model to the CPU times of all ranks in these steps. Collective."""
        local = [[step["cpu_s"], step["tokens"], step["tokens_squared"]] for step in steps]
        of_all_ranks = np.array(all_gather_json(self.session.topology.control, local)).reshape(-1, 3)
        return fit_sums(*of_all_ranks.T)


def own_communicator(topology: Topology) -> Communicator:
    """Return a communicator of all ranks for one feed, because each feed exchanges samples on its own thread.

    Collective.
    """
    group = dist.new_group(backend="gloo") if topology.world > 1 else None
    return Communicator("samples", topology.rank, topology.world, group, CollectiveLog())


def _data_lanes(spans: Sequence[Span]) -> dict[str, Any]:
    """Return the median times of partitioning a batch, in milliseconds, and the trace lanes on which this ran."""
    times = {column: [s.duration_ns * 1e-6 for s in spans if s.name == name] for column, name in DATA_SPANS.items()}
    medians = {f"{name}_ms": float(np.median(values)) for name, values in times.items() if values}
    return {**medians, "data_lanes": sorted({span.lane for span in spans})}


Row = dict[str, Any]
Floats = NDArray[np.float64]
FIGURES = ("step_s", "compute_s", "cpu_s", "data_wait_s")


def measure(bench: MeasuredBalanceConfig) -> list[Row]:
    """Measure all policies in one run of `bench.ranks` processes, and return one row per policy."""
    with tempfile.TemporaryDirectory(prefix="nestrec-balance-") as folder:
        data = bench.lengths if Path(bench.lengths).is_dir() else str(Path(folder) / "data")
        if not Path(bench.lengths).is_dir():
            num_samples = bench.ranks * bench.batch * (bench.rounds + bench.fit_rounds)
            generate(preset(bench.lengths, num_users=num_samples, num_items=bench.num_items), Path(data))
        ranks = run_on_ranks(bench.ranks, measure_rank, to_plain(bench), data)
    baseline = _table(ranks, bench.policies[0])
    return [_row(bench, policy, ranks, baseline) for policy in bench.policies]


def _table(ranks: Sequence[Mapping[str, Any]], policy: str) -> dict[str, Floats]:
    """Return each figure as an array (R, S) of ranks and steps, and the mean waiting time at collectives, (S,)."""
    table = {name: np.array([[s[name] for s in rank["steps"][policy]] for rank in ranks]) for name in FIGURES}
    num_ranks, num_steps = table["step_s"].shape
    waited = np.zeros(num_steps)
    for step in range(num_steps):
        for name in COMMUNICATORS:
            durations = [rank["steps"][policy][step]["durations_ns"][name] for rank in ranks]
            waited[step] += mean_wait_times(durations, [range(num_ranks)]).sum() * 1e-9
    return {**table, "waited_s": waited}


def _row(
    bench: MeasuredBalanceConfig, policy: str, ranks: Sequence[Mapping[str, Any]], baseline: Mapping[str, Floats]
) -> Row:
    table = _table(ranks, policy)
    first = ranks[0]
    steps = first["steps"][policy]
    step_s = table["step_s"].mean(axis=0)
    cpu_max = table["cpu_s"].max(axis=0)
    speedup = baseline["step_s"].mean(axis=0) / step_s
    speedup_cpu = baseline["cpu_s"].max(axis=0) / cpu_max
    idle = [straggler(busy, float(total)) for busy, total in zip(table["compute_s"].T, step_s, strict=True)]
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
    """Return the median and the quartiles."""
    low, middle, high = np.percentile(np.asarray(values, dtype=np.float64), [25, 50, 75]).tolist()
    return {name: middle, f"{name}_quartiles": [low, high]}
