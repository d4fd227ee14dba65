"""Measure the operations of a training step on this machine and write a hardware profile for `nestrec plan --profile`.

Stages are measured in the trace of a small job that one rank trains with several batch sizes, once with the serial
schedule and once with dual buffering; dense compute with an HSTU of several lengths; exchanges between two ranks. A
linear cost (fixed + unit x amount) is fitted to each.

    nestrec bench calibrate --samples 64,192 --lengths 16,64 --job.dim 64
"""

import statistics
import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from nestrec.balance.cost import fit_cost, hstu_cost
from nestrec.base.config import config, to_plain
from nestrec.base.cuda import resolve_device
from nestrec.data.batch_loader import MicroBatch
from nestrec.distributed import Topology
from nestrec.distributed.collectives import all_reduce_sum, all_to_all_rows, barrier
from nestrec.models import HSTU, HSTUConfig, SequenceInfo
from nestrec.pipeline import PipelineConfig
from nestrec.planning.hardware_profile import ComputeRates, LinearCost, Profile
from nestrec_bench.bench import Bench, ExtraFields, Row
from nestrec_bench.harness.local_ranks import run_on_ranks
from nestrec_bench.planning.shared_fit import StageObservations, counted_loads, fit_line, fit_profile, stage_times
from nestrec_bench.schedules.schedules_job import Contestant, JobConfig, make_batches, make_engine

_UNITS = {"deduplicate": "key", "arrange": "key", "intersect": "row", "compute": "operation", "exchange": "byte"}


@config
class CalibrateBenchConfig:
    samples: tuple[int, ...] = (64, 192, 512)
    """Batch sizes of the small job."""
    steps: int = 12
    """Number of training steps per batch size."""
    lengths: tuple[int, ...] = (16, 64, 192, 384)
    """Sequence lengths of the timed model."""
    tokens: int = 1536
    """Number of tokens of the batches whose computation is timed."""
    exchange_bytes: tuple[int, ...] = (1 << 12, 1 << 16, 1 << 20, 1 << 23)
    """Bytes that a rank sends in the timed exchanges."""
    repeats: int = 9
    """Number of repetitions of each operation that is timed alone."""
    job: JobConfig = JobConfig(num_rows=200_000)
    """Options of the small job."""


def calibrate(bench: CalibrateBenchConfig) -> tuple[list[dict[str, Any]], Profile]:
    """Return one row per operation, and the hardware profile."""
    profile = replace(_stages(bench), compute=_compute(bench))
    exchange = _exchange(bench)
    copies = _host_copies(bench.repeats)
    rows = [_row(name, getattr(profile, name)) for name in _RATES]
    for kind in ("device", "dram"):
        store = profile.store("device" if kind == "device" else "dram")
        rows += [_row(f"fetch, {kind}", store.fetch), _row(f"write_back, {kind}", store.write_back)]
    compute = profile.compute
    rows.append(_row("compute", LinearCost(fixed_s=compute.fixed_s, unit_s=compute.flop_s)))
    rows.append(_row("compute, attention", LinearCost(unit_s=compute.attention_flop_s)))
    return [*rows, *exchange, *copies], profile


_RATES = (
    "deduplicate",
    "arrange",
    "exchange_vectors",
    "exchange_gradients",
    "update_rows",
    "intersect",
    "copy",
    "dense_apply",
)


def _row(name: str, rate: LinearCost) -> dict[str, Any]:
    unit = _UNITS.get(name.split(",", maxsplit=1)[0], "byte")
    speed = {"gb_per_s": round(1e-9 / rate.unit_s, 3)} if unit == "byte" and rate.unit_s > 0 else {}
    return {
        "operation": name,
        "fixed_us": round(rate.fixed_s * 1e6, 2),
        "unit": unit,
        "unit_ps": round(rate.unit_s * 1e12, 4),
        **speed,
    }


def _stages(bench: CalibrateBenchConfig) -> Profile:
    """Fit the stages of the small job, with rows on the device and in DRAM."""
    profile = Profile()
    for store in ("dram", "device"):
        observed = [
            _observed(bench, samples, store, schedule)
            for samples in bench.samples
            for schedule in ("serial", "dual_buffer")
        ]
        fitted = fit_profile(observed, profile, by_medians=True)
        profile = fitted if store == "dram" else replace(fitted, dram=profile.dram, device=fitted.dram)
        vectors, gradients = [
            _line(observed, stage)
            for stage in ("train.embedding.exchange_vectors", "train.embedding.exchange_gradients")
        ]
        profile = replace(profile, exchange_vectors=vectors, exchange_gradients=gradients)
    return profile


def _observed(bench: CalibrateBenchConfig, samples: int, store: str, schedule: str) -> StageObservations:
    job = replace(bench.job, samples=samples, store=store)
    topology = Topology.single()
    batches = make_batches(job, topology, bench.steps + 1, 2)
    options = PipelineConfig(schedule=schedule)
    contestant = Contestant(job, make_engine(job, topology), options, batches)
    contestant.round(2)
    spans = contestant.round(bench.steps)
    tables = list(contestant.engine.tables.values())
    dense = sum(t.numel() * 4.0 for name, t in contestant.dense.tensors().items() if name.startswith("model/"))
    contestant.close()

    def flops(part: MicroBatch) -> tuple[float, float]:
        return token_flops(job) * part.num_tokens, 0.0

    # Steps are counted from one, and the batches of the warm-up come first.
    aligned = [batches[(p - 1) % len(batches)] for p in range(len(batches))]
    return StageObservations(counted_loads([aligned], tables, flops, dense_bytes=dense), stage_times(spans))


def token_flops(job: JobConfig) -> float:
    """Return the FLOPs of the small network per token, forward and backward."""
    return 6.0 * (job.dim * job.hidden + (job.layers - 1) * job.hidden * job.hidden + job.hidden)


def _line(observed: Sequence[StageObservations], stage: str) -> LinearCost:
    """Fit the local work of an exchange, which assembles vectors or sums gradients; one rank transfers nothing."""
    medians = []
    for one in observed:
        sizes = one.loads.received_bytes
        pairs = [(s, sizes[one.loads.pattern_index(step), rank, n]) for (step, rank, n), s in one.stages[stage].items()]
        medians.append(tuple(np.median(pairs, axis=0)))
    return fit_line(medians) or LinearCost()


def _compute(bench: CalibrateBenchConfig) -> ComputeRates:
    """Fit the forward and backward passes of HSTU layers at several lengths."""
    cfg = HSTUConfig(dim=64, head_dim=32, num_heads=2, num_layers=2, max_length=max(bench.lengths))
    model = HSTU(cfg)
    device = torch.device(resolve_device("auto"))
    model.to(device)
    times, lengths = [], []
    for length in bench.lengths:
        for tokens in (bench.tokens, bench.tokens // 2):
            batch = np.full(max(1, tokens // length), length)
            times.append(_timed(lambda batch=batch: _forward_backward(model, batch, device), bench.repeats, device))
            lengths.append(batch)
    fitted = fit_cost(times, lengths)
    unit = hstu_cost(dim=cfg.dim, num_heads=cfg.num_heads, head_dim=cfg.head_dim, num_layers=cfg.num_layers)
    return ComputeRates(
        fixed_s=fitted.step,
        flop_s=fitted.token / unit.token,
        attention_flop_s=fitted.token_squared / unit.token_squared,
    )


def _forward_backward(model: HSTU, lengths: np.ndarray[Any, Any], device: torch.device) -> None:
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
    total = int(lengths.sum())
    position = torch.cat([torch.arange(int(n)) for n in lengths])
    info = SequenceInfo(
        offsets=offsets.to(device),
        max_length=int(lengths.max()),
        position_T=position.to(device),
        token_key_T=torch.arange(total, device=device),
    )
    leaf = torch.randn(total, model.cfg.dim, device=device, requires_grad=True)
    model(leaf, info).square().sum().backward()


def _timed(function: Any, repeats: int, device: torch.device) -> float:
    """Return the median seconds of a function, after one warm-up run."""
    times = []
    for i in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if i:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def _exchange(bench: CalibrateBenchConfig) -> list[dict[str, Any]]:
    """Measure collectives between two ranks of this machine, by size."""
    times = run_on_ranks(2, _exchange_rank, bench)[0]
    rows = []
    for name, pairs in times.items():
        rows.append(_row(f"exchange, {name}, 2 ranks", fit_line(pairs) or LinearCost()))
    return rows


def _exchange_rank(topology: Topology, bench: CalibrateBenchConfig) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {"all_to_all": [], "all_reduce": []}
    for size in bench.exchange_bytes:
        rows = torch.zeros(size // 4, 1)
        half = [len(rows) // 2] * 2
        barrier(topology.control)
        seconds = _timed(lambda r=rows, h=half: all_to_all_rows(topology.vectors, r, h, h), bench.repeats, rows.device)
        found["all_to_all"].append((seconds, size / 2))
        seconds = _timed(lambda r=rows: all_reduce_sum(topology.dense, r), bench.repeats, rows.device)
        found["all_reduce"].append((seconds, float(size)))
    return found


def _host_copies(repeats: int) -> list[dict[str, Any]]:
    """Measure copies in host memory, and to and from the device if there is one."""
    source = torch.zeros(1 << 26, dtype=torch.uint8)
    target = torch.empty_like(source)
    copies = {"host copy": (_timed(lambda: target.copy_(source), repeats, source.device), source)}
    if torch.cuda.is_available():
        pinned = source.pin_memory()
        device = torch.device("cuda")
        remote = pinned.to(device)
        copies["host to device"] = (_timed(lambda: remote.copy_(pinned, non_blocking=True), repeats, device), source)
        copies["device to host"] = (_timed(lambda: pinned.copy_(remote, non_blocking=True), repeats, device), source)
    return [_row(name, LinearCost(unit_s=seconds / tensor.numel())) for name, (seconds, tensor) in copies.items()]


def _measure(bench: CalibrateBenchConfig) -> Generator[Row, None, ExtraFields]:
    rows, profile = calibrate(bench)
    yield from rows
    return {"profile": to_plain(profile)}


BENCH = Bench(
    config=CalibrateBenchConfig,
    measure=_measure,
    show=lambda rows, more: [("calibrate: time = fixed + unit x amount", rows)],
)
