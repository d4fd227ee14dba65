"""Test beds of `nestrec bench prediction`: the job of `nestrec bench schedules` with even or skewed lengths.

A test bed is a number of ranks, a bandwidth and a distribution of lengths. All its configurations run in the same ranks
and take turns, as in `nestrec bench schedules`.
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
    """A test bed: the ranks, links and lengths with which configurations are measured."""

    ranks: int
    """Number of processes, each with one compute thread."""
    link_mbit: float
    """Bandwidth of each rank in Mbit/s, each way."""
    lengths: Shape
    """even: every sample has job.tokens; skewed: log-normal with that mean, micro-batches by length."""


@config
class Contender:
    """A configuration that takes turns with others on a test bed."""

    schedule: str
    """Pipeline schedule."""
    micro_batches: int
    """Number of micro-batches per batch."""


@config
class BedOptions:
    """Options of measuring test beds."""

    rounds: int
    """Number of rounds per configuration."""
    steps: int
    """Number of steps per round; the first and the last one are ignored."""
    attempts: int
    """Maximum number of rounds if other processes disturb them; the least disturbed ones are used."""
    emulated: bool
    """Whether to emulate the links by waiting instead of limiting real ones."""
    undisturbed: float
    """Number of cores that other processes may use before a round counts as disturbed."""
    job: JobConfig
    """Options of the training job."""

    @property
    def num_batches(self) -> int:
        return self.steps * 2 + 3


def measure_bed(bed: Bed, entries: Sequence[Contender], options: BedOptions) -> list[dict[str, Any]]:
    """Measure the rounds of each entry: mean step of the slowest rank and its parts in ms, and stages in seconds."""
    if can_limit() and not options.emulated:
        with limited_links(bed.ranks, bed.link_mbit) as links:
            by_rank = run_on_ranks(bed.ranks, _rank, bed, list(entries), options, None, enter=links.enter)
    else:
        by_rank = run_on_ranks(bed.ranks, _rank, bed, list(entries), options, bed.link_mbit)
    return [
        {
            "entry": entry,
            "rounds": [_round([spans[i][r] for spans in by_rank]) for r in range(options.rounds)],
        }
        for i, entry in enumerate(entries)
    ]


def _rank(
    topology: Topology, bed: Bed, entries: list[Contender], options: BedOptions, emulated_mbit: float | None
) -> list[list[list[Span]]]:
    """Return the spans of each round of each entry on one rank."""
    if emulated_mbit is not None:
        topology = with_emulated_links(topology, EmulatedLink(emulated_mbit))
    contestants = [_contestant(topology, bed, entry, options) for entry in entries]
    found: list[list[tuple[float, list[Span]]]] = [[] for _ in entries]
    for turn in range(_WARM_UP_ROUNDS + options.attempts):
        for rounds, contestant in zip(found, contestants, strict=True):
            if sum(others <= options.undisturbed for others, _ in rounds) >= options.rounds:
                continue
            barrier(topology.control)
            load = BackgroundLoadMeter(topology)
            spans = contestant.round(options.steps)
            others = load.cores()
            if turn >= _WARM_UP_ROUNDS:
                rounds.append((others, spans))
    for contestant in contestants:
        contestant.close()
    return [[spans for _, spans in sorted(rounds, key=lambda one: one[0])[: options.rounds]] for rounds in found]


def _contestant(topology: Topology, bed: Bed, entry: Contender, options: BedOptions) -> Contestant:
    batches = make_bed_batches(bed, entry.micro_batches, options, topology.rank)
    pipeline = PipelineConfig(schedule=entry.schedule)
    return Contestant(options.job, make_engine(options.job, topology), pipeline, batches)


def _round(spans_of_ranks: Sequence[Sequence[Span]]) -> dict[str, Any]:
    all_spans = [span for spans in spans_of_ranks for span in spans]
    timeline = Timeline(all_spans)
    steps = timeline.steps(0)
    parts_by_rank = [[timeline.parts(step, rank) for step in steps[1:-1]] for rank in range(len(spans_of_ranks))]
    slowest = max(parts_by_rank, key=lambda parts: sum(p.step_ns for p in parts))
    means = {
        field: float(np.mean([getattr(parts, f"{field}_ns") for parts in slowest])) * 1e-6
        for field in ("step", "compute", "exposed_lookup", "exposed_communication", "idle")
    }
    return {"first": steps[0], "ms": means, "stages": stage_times(all_spans)}


def make_bed_batches(bed: Bed, num_micro_batches: int, options: BedOptions, rank: int) -> list[Batch]:
    """Return the batches of a rank; the function is pure, so that the prediction can count their loads."""
    return [_batch(bed, num_micro_batches, options.job, rank, step) for step in range(options.num_batches)]


def _batch(bed: Bed, num_micro_batches: int, job: JobConfig, rank: int, step: int) -> Batch:
    draw = np.random.default_rng([job.seed, rank, step, num_micro_batches])
    groups = np.array_split(np.arange(job.samples), num_micro_batches)
    parts = []
    for group, tokens in zip(groups, _tokens(bed.lengths, job, groups, draw), strict=True):
        shape = (len(group), tokens)
        hot = draw.integers(0, max(1, job.num_rows // 1000), shape)
        keys = np.where(draw.random(shape) < job.repeat, hot, draw.integers(0, job.num_rows, shape))
        label = torch.from_numpy(draw.integers(0, 2, len(group)).astype(np.float32))
        parts.append(MicroBatch(group, {TABLE: keys}, {"label": label}, tokens, keys.size))
    weight = float(job.samples * bed.ranks)
    counts = np.concatenate([np.full(len(part.sample_ids), part.max_length) for part in parts])
    return Batch(BatchPosition(0, step), weight, np.arange(job.samples * bed.ranks), tuple(parts), tokens=counts)


def _tokens(shape: Shape, job: JobConfig, groups: Sequence[NDArray[np.int64]], draw: np.random.Generator) -> list[int]:
    """Return the number of tokens per sample of each micro-batch, which groups samples of similar lengths."""
    if shape == "even":
        return [job.tokens] * len(groups)
    lengths = np.sort(job.tokens * np.exp(_LN_SD * draw.standard_normal(job.samples) - _LN_SD**2 / 2))
    return [max(1, round(float(lengths[group].mean()))) for group in groups]


def to_plain_bed(measured: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Convert a result of `measure_bed` to JSON-like data."""
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
    """Convert JSON-like data of `to_plain_bed` back."""
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
