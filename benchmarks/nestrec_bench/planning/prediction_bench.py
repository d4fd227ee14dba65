"""Compare simulated with measured steps on 2 and 4 ranks: a third of the configurations fits the model, the rest tests
it.

Configurations (schedule, micro-batches) are measured on test beds (ranks, bandwidth, shape of lengths). The serial
configurations, a third of all, fit the cost model. The others are predicted: the loads are counted in the measured
batches, and the program of the schedule is replayed on shared cores with the measured variation. Errors refer to the
median round; the spread of a configuration is that of its rounds.

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
from nestrec_bench.bench import Bench, ExtraFields, OutputPart, Row
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
from nestrec_bench.schedules.schedules_bench import SchedulesBenchConfig
from nestrec_bench.schedules.schedules_job import TABLE, JobConfig, TokenNetwork

_CROWDING = tuple(i * 0.05 for i in range(13))
BOUND_MEDIAN, BOUND_WORST = 0.08, 0.20


@config
class PredictionBenchConfig:
    ranks: tuple[int, ...] = (2, 4)
    """Numbers of ranks, each in its own process."""
    link_mbit: tuple[float, ...] = (300.0, 900.0)
    """Bandwidths of a rank in Mbit/s, each way."""
    lengths: tuple[Shape, ...] = ("even", "skewed")
    """Distributions of the lengths of samples: even, skewed."""
    schedules: tuple[str, ...] = ("serial", "dual_buffer", "nested")
    """Pipeline schedules."""
    micro_batches: tuple[int, ...] = (2, 8)
    """Numbers of micro-batches."""
    rounds: int = 5
    """Number of rounds per configuration."""
    steps: int = 7
    """Number of steps per round; the first and the last one are ignored."""
    emulated: bool = False
    """Whether to emulate the links by waiting instead of limiting real ones; always if network namespaces are not
    available, which the result file records."""
    attempts: int = 25
    """Maximum number of rounds if other processes disturb them; the least disturbed ones are used."""
    undisturbed: float = 0.15
    """Number of cores that other processes may use before a round counts as disturbed."""
    job: JobConfig = JobConfig(samples=128)
    """Options of the training job."""
    measured: str | None = None
    """File of measurements; new ones are added, and test beds in it are not measured again."""
    rows_of: tuple[str, ...] = ()
    """Result files of `nestrec bench schedules` to predict instead of measuring."""

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


def measure_beds(bench: PredictionBenchConfig, file: Path | None) -> Measured:
    """Return the measurements of all test beds, each read from the file if it contains it, otherwise added to it."""
    known: list[dict[str, Any]] = []
    if file is not None and file.exists():
        stored = json.loads(file.read_text())
        if from_plain(BedOptions, stored["options"]) != bench.options():
            problem = "the file was measured with other options"
            remedy = "use the same options, or another file"
            raise UserError(problem, option="--measured", value=str(file), remedy=remedy)
        known = stored["beds"]
    found = {from_plain(Bed, one["bed"]): from_plain_bed(one["measured"]) for one in known}
    for bed in bench.beds():
        if bed not in found:
            found[bed] = measure_bed(bed, bench.entries(), bench.options())
            known.append({"bed": to_plain(bed), "measured": to_plain_bed(found[bed])})
            if file is not None:
                file.write_text(json.dumps({"options": to_plain(bench.options()), "beds": known}))
    return {bed: found[bed] for bed in bench.beds()}


@dataclass(frozen=True, slots=True)
class Model:
    """The fitted cost model, by number of ranks."""

    profiles: dict[int, Profile]
    spreads: dict[int, Spreads]
    worlds: dict[int, WorldFit]
    crowding: float


@dataclass(frozen=True, slots=True)
class _Case:
    """A configuration with its measurements."""

    bed: Bed
    entry: Contender
    rounds: list[dict[str, Any]]
    loads: Loads
    """Loads of all batches, in the order of steps from 1."""
    burst_bytes: float
    """Number of bytes that a link transfers without delay after a pause."""

    @property
    def measured_ms(self) -> float:
        return float(statistics.median(turn["ms"]["step"] for turn in self.rounds))

    @property
    def spread(self) -> float:
        """Half the range of the rounds, as a fraction of the median."""
        times = [turn["ms"]["step"] for turn in self.rounds]
        return float(max(times) - min(times)) / 2 / self.measured_ms

    @property
    def is_used_to_fit(self) -> bool:
        """Whether the configuration fits the model: a serial one does, because its stages do not overlap."""
        return self.entry.schedule == "serial"


def predict(bench: PredictionBenchConfig, measured: Measured) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return one row per configuration, and the errors of those that were not used to fit."""
    options = bench.options()
    burst_bytes = 0.0 if options.emulated else float(BURST_BYTES)
    cases = [
        _Case(bed, one["entry"], one["rounds"], _loads(bed, one["entry"], options), burst_bytes)
        for bed, entries in measured.items() for one in entries
    ]  # fmt: skip
    model = fit_model([case for case in cases if case.is_used_to_fit], bench.steps)
    rows = [_row(case, model, bench.steps) for case in cases]
    return rows, _summary(rows, model)


def fit_model(cases: Sequence[_Case], steps: int) -> Model:
    """Fit the cost model to serial runs.

    Linear costs come from test beds with a core per rank, exchanges from each number of ranks, and the contention of
    cores from the duration of steps.
    """
    plain = [_observed(case) for case in cases if case.bed.ranks <= usable_cores()]
    if not plain:
        problem = f"each number of ranks exceeds the {usable_cores()} usable cores, so the model cannot be fitted"
        numbers = sorted({case.bed.ranks for case in cases})
        raise UserError(problem, option="ranks", value=numbers, remedy=f"add a number up to {usable_cores()}")
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
    """Return the contention that best explains the steps of ranks that share cores."""
    crowded = [case for case in cases if case.bed.ranks > usable_cores()]

    def error(crowding: float) -> float:
        tried = replace(model, crowding=crowding)
        return statistics.fmean(abs(_step_ms(case, tried, steps, rounds=2) / case.measured_ms - 1) for case in crowded)

    return min(_CROWDING, key=error) if crowded else 0.0


def _loads(bed: Bed, entry: Contender, options: BedOptions) -> Loads:
    """Return the loads of a configuration; those of step 1 have index 1, in the order in which batches are taken."""
    job = options.job
    batches = [make_bed_batches(bed, entry.micro_batches, options, rank) for rank in range(bed.ranks)]
    aligned = [[own[(p - 1) % len(own)] for p in range(len(own))] for own in batches]
    table = TableConfig(
        name=TABLE, dim=job.dim, num_rows=job.num_rows, store=StoreConfig(kind="dram"),
        optimizer=RowOptimizerConfig(kind=job.optimizer),
    )  # fmt: skip
    dense = 4.0 * sum(p.numel() for p in TokenNetwork(job).parameters())
    return counted_loads(aligned, [table], lambda part: (token_flops(job) * part.num_tokens, 0.0), dense_bytes=dense)


def _step_ms(case: _Case, model: Model, steps: int, rounds: int | None = None) -> float:
    """Return the median over the rounds of the simulated step of the slowest rank."""
    return statistics.median(_simulated(case, model, steps, turn["first"]) for turn in case.rounds[:rounds])


def _simulated(case: _Case, model: Model, steps: int, first: int) -> float:
    ranks = case.bed.ranks
    options = PipelineConfig(schedule=case.entry.schedule)
    program = rehearse(options, micro_batches=case.entry.micro_batches, steps=steps)
    mesh = Mesh(1, ranks)
    links = StageObservations(case.loads, {}, case.bed.link_mbit / 8e3, case.burst_bytes).links()
    hands_over = any("train.embedding.copy_shared_rows" in stage.operations for stage in program.stages)
    loads = case.loads.starting_at(first - 1)
    costs = StepCosts(loads, model.profiles[ranks], links, mesh, store="dram", hands_over=hands_over)
    hosts = Hosts(ranks=ranks, cores=usable_cores(), contention=model.crowding)
    speed = case.bed.link_mbit / 8e3 * 1e9
    varied = RandomizedCosts(costs, model.spreads[ranks], ranks, wire_speed=speed, seed=first)
    return float(replay_shared(program, varied, mesh, hosts).step_s().max()) * 1e3


def _row(case: _Case, model: Model, steps: int) -> dict[str, Any]:
    predicted = _step_ms(case, model, steps)
    return {
        "schedule": case.entry.schedule, "ranks": case.bed.ranks, "micro_batches": case.entry.micro_batches,
        "link_mbit": case.bed.link_mbit, "lengths": case.bed.lengths, "used_to_fit": case.is_used_to_fit,
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
    """Return the main columns of the rows, for a terminal."""
    names: dict[str, Callable[[Any], Any]] = {
        "schedule": str, "ranks": int, "micro_batches": int, "link_mbit": float, "lengths": str, "used_to_fit": bool,
        "measured_ms": float, "predicted_ms": float, "error": float, "spread": float,
    }  # fmt: skip
    return [{name: convert(row[name]) for name, convert in names.items()} for row in rows]


def _measure(bench: PredictionBenchConfig) -> Generator[Row, None, ExtraFields]:
    if bench.rows_of:
        return (yield from _predict_files(bench.rows_of))
    rows, summary = predict(bench, measure_beds(bench, None if bench.measured is None else Path(bench.measured)))
    yield from rows
    return {"summary": summary}


def _predict_files(files: Sequence[str]) -> Generator[Row, None, ExtraFields]:
    """Predict the overlapping schedules in result files of one machine from their serial rows."""
    frames = [load_frame(Path(file)) for file in files]
    rows, summary = predict_rows([row for frame in frames for row in frame["rows"]])
    yield from rows
    measured_by = [frame["command"] for frame in frames]
    emulated = any(frame["emulated"] for frame in frames)
    return {"summary": summary, "measured_by": measured_by, "hardware": frames[0]["hardware"], "emulated": emulated}


def _show(rows: Sequence[Row], more: ExtraFields) -> list[OutputPart]:
    is_from_files = "measured_by" in more
    errors = [{k: v for k, v in more["summary"].items() if not isinstance(v, dict)}]
    return [("prediction: milliseconds of a step", rows if is_from_files else short_rows(rows)), ("errors", errors)]


BENCH = Bench(
    config=PredictionBenchConfig, measure=_measure, show=_show, is_emulated=lambda bench: bench.options().emulated
)


_STEPS = 8
LOOKUP_STAGES = SchedulesBenchConfig().lookup_stages
"""Division of the lookup into stages, as the schedules benchmark emulates it."""
_SAME = ("ranks", "micro_batches", "window_cache", "link_mbit")


def predict_rows(rows: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return one row per schedule that has a serial counterpart, and the errors."""
    serial = {_setting(row): row for row in rows if row["schedule"] == "serial"}
    found = [
        _comparison_row(row, serial[_setting(row)])
        for row in rows
        if row["schedule"] != "serial" and _setting(row) in serial
    ]
    if not found:
        problem = "the files do not contain serial and other schedules with the same setting"
        remedy = "name a file with serial and other schedules at the same partition"
        raise UserError(problem, option="rows", value=len(rows), remedy=remedy)
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


def _setting(row: Mapping[str, Any]) -> tuple[Any, ...]:
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
    """Predict a step from its serial counterpart; idle time of the serial step counts as computation."""
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
        "fetch_rows": read,
        "prefetch_rows": read,
        "write_back": written,
    }
    options = PipelineConfig(schedule=row["schedule"], window_cache=bool(row.get("window_cache")))
    program = rehearse(options, micro_batches=parts, steps=_STEPS)
    return float(replay(program, UniformCosts(seconds), Mesh(1, max(1, row["ranks"]))).step_s()[0])
