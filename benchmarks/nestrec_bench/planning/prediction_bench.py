"""Simulated steps beside measured ones on 2 and 4 ranks: fitted to a third of the configurations, tested on others.

Configurations (schedule, micro-batches) are measured on beds (ranks, bandwidth, shape of lengths). The serial ones, a
third of them, fit the cost model; the others are predicted: loads counted from the very batches, the schedule's own
program, replayed on shared cores with the chance that was measured. Errors are of the median round; the spread of a
configuration is that of its own rounds.

    nestrec bench prediction --ranks 2 --link_mbit 300,900 --rounds 5
"""

import json
import statistics
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nestrec.base.config import config, to_plain
from nestrec.base.config_values import from_plain
from nestrec.base.errors import UserError
from nestrec.base.thread_team import usable_cores
from nestrec.embedding import RowOptimizerConfig, StoreConfig, TableConfig
from nestrec.pipeline import PipelineConfig
from nestrec.planning.hardware_profile import Profile
from nestrec.planning.simulator.program_replay import Mesh, replay
from nestrec.planning.simulator.rehearsal import rehearse
from nestrec.planning.simulator.shared_cores import Hosts, replay_shared
from nestrec.planning.simulator.step_costs import RandomizedCosts, Spreads, StepCosts
from nestrec.planning.workload import Loads
from nestrec.report.result_file import load_frame
from nestrec_bench.bench import Bench, More, Row, Shown
from nestrec_bench.harness.links import BURST_BYTES, can_limit
from nestrec_bench.planning.calibrate_bench import token_flops
from nestrec_bench.planning.papers.comparison import UniformCosts
from nestrec_bench.planning.prediction_job import (
    Bed,
    BedOptions,
    Contender,
    Shape,
    from_plain_bed,
    make_bed_batches,
    measure_bed,
    to_plain_bed,
)
from nestrec_bench.planning.shared_fit import (
    StageObservations,
    WorldFit,
    compute_spread,
    counted_loads,
    describe,
    fit_world,
    profile_of,
)
from nestrec_bench.schedules.schedules_bench import SchedulesBench
from nestrec_bench.schedules.schedules_job import TABLE, JobConfig, TokenNetwork

_CROWDING = tuple(i * 0.05 for i in range(13))
BOUND_MEDIAN, BOUND_WORST = 0.08, 0.20


@config
class PredictionBench:
    ranks: tuple[int, ...] = (2, 4)
    """numbers of processes"""
    link_mbit: tuple[float, ...] = (300.0, 900.0)
    """bandwidths of a rank, each way"""
    lengths: tuple[Shape, ...] = ("even", "skewed")
    """shapes of the lengths of samples: even, skewed"""
    schedules: tuple[str, ...] = ("serial", "dual_buffer", "nested")
    """which schedules"""
    micro_batches: tuple[int, ...] = (2, 8)
    """numbers of micro-batches"""
    rounds: int = 5
    """rounds of each configuration"""
    steps: int = 7
    """steps of a round, first and last left out"""
    emulated: bool = False
    """time the links instead of limiting them; also done, and said, where network namespaces cannot be had"""
    attempts: int = 25
    """rounds at the most, where other processes disturb: the least disturbed are kept"""
    undisturbed: float = 0.15
    """cores that other processes may take before a round counts as disturbed"""
    job: JobConfig = JobConfig(samples=128)
    """what is trained"""
    measured: str | None = None
    """file of measurements: kept, and beds in it not repeated"""
    rows_of: tuple[str, ...] = ()
    """predict result files of `bench schedules` instead"""

    def beds(self) -> list[Bed]:
        return [Bed(ranks=r, link_mbit=m, lengths=s) for r in self.ranks for m in self.link_mbit for s in self.lengths]

    def entries(self) -> list[Contender]:
        return [
            Contender(schedule=schedule, micro_batches=n) for n in self.micro_batches for schedule in self.schedules
        ]

    def options(self) -> BedOptions:
        return BedOptions(
            rounds=self.rounds, steps=self.steps, attempts=self.attempts, undisturbed=self.undisturbed, job=self.job,
            emulated=self.emulated or not can_limit(),
        )  # fmt: skip


Measured = dict[Bed, list[dict[str, Any]]]


def measure_beds(bench: PredictionBench, kept: Path | None) -> Measured:
    """All beds; those in the file `kept` are taken from it, and new ones are added to it one by one."""
    known: list[dict[str, Any]] = []
    if kept is not None and kept.exists():
        stored = json.loads(kept.read_text())
        if from_plain(BedOptions, stored["options"]) != bench.options():
            remedy = "give the same options, or another file"
            raise UserError("was measured with other options", option="--measured", value=str(kept), remedy=remedy)
        known = stored["beds"]
    found = {from_plain(Bed, one["bed"]): from_plain_bed(one["measured"]) for one in known}
    for bed in bench.beds():
        if bed not in found:
            found[bed] = measure_bed(bed, bench.entries(), bench.options())
            known.append({"bed": to_plain(bed), "measured": to_plain_bed(found[bed])})
            if kept is not None:
                kept.write_text(json.dumps({"options": to_plain(bench.options()), "beds": known}))
    return {bed: found[bed] for bed in bench.beds()}


@dataclass(frozen=True, slots=True)
class Model:
    """What was fitted, for each number of ranks."""

    profiles: dict[int, Profile]
    spreads: dict[int, Spreads]
    worlds: dict[int, WorldFit]
    crowding: float


@dataclass(frozen=True, slots=True)
class _Case:
    """A configuration with what was measured of it."""

    bed: Bed
    entry: Contender
    rounds: list[dict[str, Any]]
    loads: Loads
    """of all batches, in the order of steps from 1"""
    burst_bytes: float
    """that pass a link at no cost after a pause"""

    @property
    def measured_ms(self) -> float:
        return float(statistics.median(turn["ms"]["step"] for turn in self.rounds))

    @property
    def spread(self) -> float:
        """Half the range of the rounds, as a part of the median."""
        times = [turn["ms"]["step"] for turn in self.rounds]
        return float(max(times) - min(times)) / 2 / self.measured_ms

    @property
    def fits(self) -> bool:
        """Nothing overlaps in a serial run: it is used to fit, and the others are predicted."""
        return self.entry.schedule == "serial"


def predict(bench: PredictionBench, measured: Measured) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A row for each configuration, and the errors of those that were not used to fit."""
    options = bench.options()
    burst_bytes = 0.0 if options.emulated else float(BURST_BYTES)
    cases = [
        _Case(bed, one["entry"], one["rounds"], _loads(bed, one["entry"], options), burst_bytes)
        for bed, entries in measured.items() for one in entries
    ]  # fmt: skip
    model = fit_model([case for case in cases if case.fits], bench.steps)
    rows = [_row(case, model, bench.steps) for case in cases]
    return rows, _summary(rows, model)


def fit_model(cases: Sequence[_Case], steps: int) -> Model:
    """From serial runs: lines from ranks with a core each, exchanges by number of ranks, crowding from whole steps."""
    plain = [_observed(case) for case in cases if case.bed.ranks <= usable_cores()]
    if not plain:
        raise UserError("has no bed with a core for each rank", option="ranks", value=usable_cores(), remedy="add one")
    profiles: dict[int, Profile] = {}
    spreads: dict[int, Spreads] = {}
    worlds: dict[int, WorldFit] = {}
    for ranks in sorted({case.bed.ranks for case in cases}):
        worlds[ranks] = world = fit_world(
            [_observed(case) for case in cases if case.bed.ranks == ranks], usable_cores()
        )
        profiles[ranks] = profile = profile_of(plain, world)
        spreads[ranks] = {"forward_backward": compute_spread(plain, profile), "exchange_vectors": world.spread,
                          "exchange_gradients": world.spread}  # fmt: skip
    model = Model(profiles, spreads, worlds, 0.0)
    return replace(model, crowding=_best_crowding(cases, model, steps))


def _observed(case: _Case) -> StageObservations:
    stages: dict[str, dict[tuple[int, int, int], float]] = {}
    for turn in case.rounds:
        for name, times in turn["stages"].items():
            stages.setdefault(name, {}).update(times)
    return StageObservations(case.loads, stages, case.bed.link_mbit / 8e3, case.burst_bytes)


def _best_crowding(cases: Sequence[_Case], model: Model, steps: int) -> float:
    """What explains the steps best of ranks that share cores."""
    crowded = [case for case in cases if case.bed.ranks > usable_cores()]

    def error(crowding: float) -> float:
        tried = replace(model, crowding=crowding)
        return statistics.fmean(abs(_step_ms(case, tried, steps, rounds=2) / case.measured_ms - 1) for case in crowded)

    return min(_CROWDING, key=error) if crowded else 0.0


def _loads(bed: Bed, entry: Contender, options: BedOptions) -> Loads:
    """Of step 1 at place 1, as batches are taken."""
    job = options.job
    batches = [make_bed_batches(bed, entry.micro_batches, options, rank) for rank in range(bed.ranks)]
    aligned = [[mine[(p - 1) % len(mine)] for p in range(len(mine))] for mine in batches]
    table = TableConfig(
        name=TABLE, dim=job.dim, num_rows=job.num_rows, store=StoreConfig(kind="dram"),
        optimizer=RowOptimizerConfig(kind=job.optimizer),
    )  # fmt: skip
    dense = 4.0 * sum(p.numel() for p in TokenNetwork(job).parameters())
    return counted_loads(aligned, [table], lambda part: (token_flops(job) * part.num_tokens, 0.0), dense_bytes=dense)


def _step_ms(case: _Case, model: Model, steps: int, rounds: int | None = None) -> float:
    """Median over the rounds of the simulated step of the slowest rank."""
    return statistics.median(_simulated(case, model, steps, turn["first"]) for turn in case.rounds[:rounds])


def _simulated(case: _Case, model: Model, steps: int, first: int) -> float:
    ranks = case.bed.ranks
    options = PipelineConfig(schedule=case.entry.schedule)
    program = rehearse(options, micro_batches=case.entry.micro_batches, steps=steps)
    mesh = Mesh(1, ranks)
    links = StageObservations(case.loads, {}, case.bed.link_mbit / 8e3, case.burst_bytes).links()
    hands_over = any("train.embedding.copy" in stage.operations for stage in program.stages)
    loads = case.loads.starting_at(first - 1)
    costs = StepCosts(loads, model.profiles[ranks], links, mesh, store="dram", hands_over=hands_over)
    hosts = Hosts(ranks=ranks, cores=usable_cores(), crowding=model.crowding)
    speed = case.bed.link_mbit / 8e3 * 1e9
    varied = RandomizedCosts(costs, model.spreads[ranks], ranks, wire_speed=speed, seed=first)
    return float(replay_shared(program, varied, mesh, hosts).step_s().max()) * 1e3


def _row(case: _Case, model: Model, steps: int) -> dict[str, Any]:
    predicted = _step_ms(case, model, steps)
    return {
        "schedule": case.entry.schedule, "ranks": case.bed.ranks, "micro_batches": case.entry.micro_batches,
        "link_mbit": case.bed.link_mbit, "lengths": case.bed.lengths, "used_to_fit": case.fits,
        "measured_ms": round(case.measured_ms, 2), "predicted_ms": round(predicted, 2),
        "error": round(predicted / case.measured_ms - 1.0, 4), "spread": round(case.spread, 4),
        "bound": round(max(BOUND_WORST, 2 * case.spread), 4),
    }  # fmt: skip


def _summary(rows: Sequence[Mapping[str, Any]], model: Model) -> dict[str, Any]:
    tested = [row for row in rows if not row["used_to_fit"]]
    errors = [abs(row["error"]) for row in tested]
    worst = max(tested, key=lambda row: abs(row["error"]) / row["bound"])
    return {
        "configurations": len(rows), "used_to_fit": len(rows) - len(tested), "tested": len(tested),
        "median_error": round(statistics.median(errors), 4), "largest_error": round(max(errors), 4),
        "worst_against_its_bound": round(abs(worst["error"]) / worst["bound"], 3),
        "its_spread": worst["spread"], "is_within": statistics.median(errors) <= BOUND_MEDIAN
        and all(abs(row["error"]) <= row["bound"] for row in tested),
        "crowding": round(model.crowding, 3),
        **{f"between_{ranks}_ranks": describe(world) for ranks, world in model.worlds.items()},
    }  # fmt: skip


def short_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What fits a terminal."""
    names: dict[str, Callable[[Any], Any]] = {
        "schedule": str, "ranks": int, "micro_batches": int, "link_mbit": float, "lengths": str, "used_to_fit": bool,
        "measured_ms": float, "predicted_ms": float, "error": float, "spread": float,
    }  # fmt: skip
    return [{name: of(row[name]) for name, of in names.items()} for row in rows]


def _rows_of(bench: PredictionBench) -> Generator[Row, None, More]:
    if bench.rows_of:
        return (yield from _of_files(bench.rows_of))
    rows, summary = predict(bench, measure_beds(bench, None if bench.measured is None else Path(bench.measured)))
    yield from rows
    return {"summary": summary}


def _of_files(files: Sequence[str]) -> Generator[Row, None, More]:
    """The overlapping schedules of result files of one machine out of their serial rows."""

    frames = [load_frame(Path(file)) for file in files]
    rows, summary = predict_rows([row for frame in frames for row in frame["rows"]])
    yield from rows
    measured_by = [frame["command"] for frame in frames]
    emulated = any(frame["emulated"] for frame in frames)
    return {"summary": summary, "measured_by": measured_by, "hardware": frames[0]["hardware"], "emulated": emulated}


def _show(rows: Sequence[Row], more: More) -> list[Shown]:
    of_files = "measured_by" in more
    errors = [{k: v for k, v in more["summary"].items() if not isinstance(v, dict)}]
    return [("prediction: milliseconds of a step", rows if of_files else short_rows(rows)), ("errors", errors)]


BENCH = Bench(config=PredictionBench, measure=_rows_of, show=_show, is_emulated=lambda bench: bench.options().emulated)


_STEPS = 8
LOOKUP_STAGES = SchedulesBench().lookup_stages
"""How the lookup divides: the bench says so for the part of it that it emulates."""
_SAME = ("ranks", "micro_batches", "window_cache", "link_mbit")


def predict_rows(rows: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A row for each schedule with a serial twin, and the errors."""
    serial = {_place(row): row for row in rows if row["schedule"] == "serial"}
    found = [
        _comparison_row(row, serial[_place(row)])
        for row in rows
        if row["schedule"] != "serial" and _place(row) in serial
    ]
    if not found:
        remedy = "give a file with serial and other schedules at the same partition"
        raise UserError("nothing to predict", option="rows", value=len(rows), remedy=remedy)
    errors = [abs(row["error"]) for row in found]
    within = statistics.median(errors) <= BOUND_MEDIAN and all(abs(row["error"]) <= row["bound"] for row in found)
    summary = {
        "configurations": len(found) + len(serial),
        "used_to_fit": len(serial),
        "tested": len(found),
        "median_error": round(statistics.median(errors), 4),
        "largest_error": round(max(errors), 4),
        "is_within": within,
    }
    return found, summary


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in _SAME)


def _comparison_row(row: Mapping[str, Any], serial: Mapping[str, Any]) -> dict[str, Any]:
    predicted = _predicted_ms(row, serial)
    low, high = row.get("step_ms_spread", (row["step_ms"], row["step_ms"]))
    spread = (high - low) / 2 / row["step_ms"]
    return {
        "schedule": row["schedule"],
        **{name: row.get(name) for name in _SAME},
        "measured_ms": row["step_ms"],
        "predicted_ms": round(predicted, 3),
        "error": round(predicted / row["step_ms"] - 1.0, 4),
        "spread": round(spread, 4),
        "bound": round(max(BOUND_WORST, 2 * spread), 4),
    }


def _predicted_ms(row: Mapping[str, Any], serial: Mapping[str, Any]) -> float:
    """What does not overlap in the serial step and has no kind (idle) stays with the computation."""
    parts = serial["micro_batches"]
    compute = serial["compute_ms"] + serial["idle_ms"]
    exchange, lookup = serial["raw_comm_ms"] / (2 * parts), serial["raw_lookup_ms"]
    loaded, keys, read, written = (lookup * part for part in LOOKUP_STAGES)
    seconds = {
        "forward_backward": compute / parts,
        "exchange_vectors": exchange,
        "exchange_gradients": exchange,
        "deduplicate": loaded,
        "exchange_keys": keys,
        "fetch": read,
        "read_ahead": read,
        "write_back": written,
    }
    options = PipelineConfig(schedule=row["schedule"], window_cache=bool(row.get("window_cache")))
    program = rehearse(options, micro_batches=parts, steps=_STEPS)
    return float(replay(program, UniformCosts(seconds), Mesh(1, max(1, row["ranks"]))).step_s()[0])
