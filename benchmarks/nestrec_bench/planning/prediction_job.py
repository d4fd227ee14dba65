"""Beds of `nestrec bench prediction`: the job of `nestrec bench schedules` with even or skewed lengths, measured.

A bed is a number of ranks, a bandwidth and a shape of lengths. All its configurations live in the same ranks and take
turns, as in `nestrec bench schedules`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.config import config, to_plain
from nestrec.base.config_values import from_plain
from nestrec.data.batch_loader import Batch, MicroBatch
from nestrec.data.batch_order import BatchPosition
from nestrec.distributed import Topology
from nestrec.distributed.collectives import barrier
from nestrec.pipeline import PipelineConfig
from nestrec.trace import Span, Timeline
from nestrec_bench.harness.background_load import BackgroundLoadMeter
from nestrec_bench.harness.links import EmulatedLink, can_limit, limited_links, with_emulated_links
from nestrec_bench.harness.local_ranks import run_on_ranks
from nestrec_bench.planning.shared_fit import stage_times
from nestrec_bench.schedules.schedules_job import TABLE, Contestant, JobConfig, make_engine

Shape = Literal["even", "skewed"]
_WARM_UP_ROUNDS = 1
_LN_SD = 0.8


@config
class Bed:
    """Where configurations are measured."""

    ranks: int
    """processes, each with one thread of computing"""
    link_mbit: float
    """of each rank, each way"""
    lengths: Shape
    """even: every sample has job.tokens; skewed: log-normal with that mean, micro-batches by length"""


@config
class Contender:
    """What takes turns on a bed."""

    schedule: str
    """which schedule"""
    micro_batches: int
    """parts of a batch"""


@config
class BedOptions:
    """How beds are measured."""

    rounds: int
    """rounds of each configuration"""
    steps: int
    """steps of a round, first and last left out"""
    attempts: int
    """rounds at the most, where others disturb: the least disturbed are kept"""
    emulated: bool
    """time the links instead of limiting them"""
    undisturbed: float
    """cores that other processes may take before a round counts as disturbed"""
    job: JobConfig
    """what is trained"""

    @property
    def num_batches(self) -> int:
        return self.steps * 2 + 3


def measure_bed(bed: Bed, entries: Sequence[Contender], options: BedOptions) -> list[dict[str, Any]]:
    """For each entry, for each round: mean step of the slowest rank in milliseconds, parts, and stages in seconds."""
    if can_limit() and not options.emulated:
        with limited_links(bed.ranks, bed.link_mbit) as links:
            answers = run_on_ranks(bed.ranks, _rank, bed, list(entries), options, None, enter=links.enter)
    else:
        answers = run_on_ranks(bed.ranks, _rank, bed, list(entries), options, bed.link_mbit)
    return [
        {
            "entry": entry,
            "rounds": [_round([answer[i][r] for answer in answers]) for r in range(options.rounds)],
        }
        for i, entry in enumerate(entries)
    ]


def _rank(
    topology: Topology, bed: Bed, entries: list[Contender], options: BedOptions, emulated_mbit: float | None
) -> list[list[list[Span]]]:
    """Spans of each round of each entry."""
    if emulated_mbit is not None:
        topology = with_emulated_links(topology, EmulatedLink(emulated_mbit))
    contestants = [_contestant(topology, bed, entry, options) for entry in entries]
    found: list[list[tuple[float, list[Span]]]] = [[] for _ in entries]
    for turn in range(_WARM_UP_ROUNDS + options.attempts):
        for kept, contestant in zip(found, contestants, strict=True):
            if sum(others <= options.undisturbed for others, _ in kept) >= options.rounds:
                continue
            barrier(topology.control)
            load = BackgroundLoadMeter(topology)
            taken = contestant.round(options.steps)
            others = load.cores()
            if turn >= _WARM_UP_ROUNDS:
                kept.append((others, taken))
    for contestant in contestants:
        contestant.close()
    return [[spans for _, spans in sorted(kept, key=lambda one: one[0])[: options.rounds]] for kept in found]


def _contestant(topology: Topology, bed: Bed, entry: Contender, options: BedOptions) -> Contestant:
    batches = make_bed_batches(bed, entry.micro_batches, options, topology.rank)
    pipeline = PipelineConfig(schedule=entry.schedule)
    return Contestant(options.job, make_engine(options.job, topology), pipeline, batches)


def _round(spans_of_ranks: Sequence[Sequence[Span]]) -> dict[str, Any]:
    everything = [span for spans in spans_of_ranks for span in spans]
    timeline = Timeline(everything)
    steps = timeline.steps(0)
    whole = [[timeline.parts(step, rank) for step in steps[1:-1]] for rank in range(len(spans_of_ranks))]
    slowest = max(whole, key=lambda parts: sum(p.step_ns for p in parts))
    means = {
        field: float(np.mean([getattr(parts, f"{field}_ns") for parts in slowest])) * 1e-6
        for field in ("step", "compute", "exposed_lookup", "exposed_communication", "idle")
    }
    return {"first": steps[0], "ms": means, "stages": stage_times(everything)}


def make_bed_batches(bed: Bed, num_micro_batches: int, options: BedOptions, rank: int) -> list[Batch]:
    """The batches of a rank: pure, so whoever predicts can count them."""
    return [_batch(bed, num_micro_batches, options.job, rank, step) for step in range(options.num_batches)]


def _batch(bed: Bed, num_micro_batches: int, job: JobConfig, rank: int, step: int) -> Batch:
    draw = np.random.default_rng([job.seed, rank, step, num_micro_batches])
    groups = np.array_split(np.arange(job.samples), num_micro_batches)
    parts = []
    for mine, tokens in zip(groups, _tokens(bed.lengths, job, groups, draw), strict=True):
        shape = (len(mine), tokens)
        hot = draw.integers(0, max(1, job.num_rows // 1000), shape)
        keys = np.where(draw.random(shape) < job.repeat, hot, draw.integers(0, job.num_rows, shape))
        label = torch.from_numpy(draw.integers(0, 2, len(mine)).astype(np.float32))
        parts.append(MicroBatch(mine, {TABLE: keys}, {"label": label}, tokens, keys.size))
    weight = float(job.samples * bed.ranks)
    counts = np.concatenate([np.full(len(part.sample_ids), part.max_length) for part in parts])
    return Batch(BatchPosition(0, step), weight, np.arange(job.samples * bed.ranks), tuple(parts), tokens=counts)


def _tokens(shape: Shape, job: JobConfig, groups: Sequence[NDArray[np.int64]], draw: np.random.Generator) -> list[int]:
    """Tokens of the samples of each micro-batch: samples of similar lengths stand together."""
    if shape == "even":
        return [job.tokens] * len(groups)
    lengths = np.sort(job.tokens * np.exp(_LN_SD * draw.standard_normal(job.samples) - _LN_SD**2 / 2))
    return [max(1, round(float(lengths[group].mean()))) for group in groups]


def to_plain_bed(measured: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What `measure_bed` gave, as JSON-like data."""
    return [
        {
            "entry": to_plain(one["entry"]),
            "rounds": [
                {
                    **turn,
                    "stages": {name: [[*at, s] for at, s in times.items()] for name, times in turn["stages"].items()},
                }
                for turn in one["rounds"]
            ],
        }
        for one in measured
    ]


def from_plain_bed(plain: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The inverse of `to_plain_bed`."""
    return [
        {
            "entry": from_plain(Contender, one["entry"]),
            "rounds": [
                {
                    **turn,
                    "stages": {
                        name: {(step, rank, part): s for step, rank, part, s in times}
                        for name, times in turn["stages"].items()
                    },
                }
                for turn in one["rounds"]
            ],
        }
        for one in plain
    ]
