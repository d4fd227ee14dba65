"""Replays a program over costs on many ranks at once: one array of times for each stage, one element a rank.

Stages are taken in the order of the program. A stage waits for its lane, for the stages it comes after and for the
moment of its submission; a collective waits for the last rank of its group. That is all the lanes do, too.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from nestrec.planning.simulator.program import Program, Stage
from nestrec.trace import Span, StepParts, Timeline

Times = NDArray[np.float64]
Scope = Literal["rank", "shards", "replicas", "all"]
"""Who takes part: nobody else, the shards of a replica group, the holders of a shard, everyone."""
EVERYONE = -1
"""Stands for the last rank to enter a collective, in spans."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of an operation: one number, or one a rank."""

    busy_s: float | Times = 0.0
    """of the core or device that works on it"""
    wire_s: float | Times = 0.0
    """of the link, after the last rank of the scope has come"""
    scope: Scope = "rank"
    latency_s: float = 0.0
    """after that"""
    burst_s: float = 0.0
    """time of the link that passes at no cost after a pause of as long"""


class Costs(Protocol):
    """What operations take."""

    def of(self, operation: str, step: int, micro_batch: int | None) -> Cost: ...


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks as replica groups of shards: rank = replica * num_shards + shard."""

    num_replicas: int
    num_shards: int

    @property
    def world(self) -> int:
        return self.num_replicas * self.num_shards

    def joined(self, times: Times, scope: Scope) -> Times:
        """When the last rank of each rank's group has come."""
        if scope == "rank" or self.world == 1:
            return times
        if scope == "all":
            return np.full_like(times, times.max())
        grid = times.reshape(self.num_replicas, self.num_shards)
        last = grid.max(axis=1 if scope == "shards" else 0, keepdims=True)
        return np.broadcast_to(last, grid.shape).reshape(-1)


@dataclass(frozen=True, slots=True)
class Replay:
    """When everything happened, in seconds from the start."""

    program: Program
    start: Times
    """(stages, ranks)"""
    entered: Times
    """(stages, ranks): when the last rank of a rank's group entered the stage; for a collective"""
    end: Times
    """(stages, ranks)"""
    begin_of: dict[int, Times]
    """step to (ranks,)"""
    end_of: dict[int, Times]
    """step to (ranks,)"""

    def middle(self) -> tuple[int, ...]:
        """The steps that neither fill nor empty the pipeline."""
        return self.program.steps[1:-1]

    def step_s(self) -> Times:
        """(ranks,) mean time of the middle steps."""
        steps = self.middle()
        mean: Times = np.stack([self.end_of[step] - self.begin_of[step] for step in steps]).mean(axis=0)
        return mean

    def pace_s(self) -> float:
        """Time from the end of a step to the end of the next, on average: what samples a second follow from."""
        first, last = self.middle()[0], self.middle()[-1]
        return float((self.end_of[last] - self.begin_of[first]).mean()) / (last - first + 1)

    def slowest(self) -> int:
        """The rank whose steps take longest."""
        return int(self.step_s().argmax())

    def spans(self, rank: int) -> list[Span]:
        """The trace of a rank, as a real run leaves it, with the entries of its collectives as those of EVERYONE."""
        return _Spans(self, rank).walk()

    def parts(self, rank: int) -> StepParts:
        """Mean parts of the middle steps on a rank."""
        timeline = Timeline(self.spans(rank))
        found = [timeline.parts(step, rank) for step in self.middle()]
        return StepParts(
            compute_ns=_mean([p.compute_ns for p in found]),
            exposed_lookup_ns=_mean([p.exposed_lookup_ns for p in found]),
            exposed_communication_ns=_mean([p.exposed_communication_ns for p in found]),
            idle_ns=_mean([p.idle_ns for p in found]),
        )


def replay(program: Program, costs: Costs, mesh: Mesh) -> Replay:
    """Every rank with a core or device for each of its lanes."""
    return _Walk(program, costs, mesh).run()


class _Walk:
    def __init__(self, program: Program, costs: Costs, mesh: Mesh) -> None:
        self._program = program
        self._costs = costs
        self._mesh = mesh
        shape = (len(program.stages), mesh.world)
        self._start, self._entered, self._end = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self._now = np.zeros(mesh.world)
        self._sent = np.full(mesh.world, -np.inf)
        self._free: dict[str, Times] = defaultdict(lambda: np.zeros(mesh.world))
        self._begin_of: dict[int, Times] = {}
        self._end_of: dict[int, Times] = {}

    def run(self) -> Replay:
        for event in self._program.events:
            if event.kind == "begin":
                self._begin_of[event.place] = self._now
            elif event.kind == "end":
                self._end_of[event.place] = self._now
            elif event.kind == "wait":
                self._now = np.maximum(self._now, self._end[event.place])
            elif event.kind == "work":
                self._now = self._run_stage(event.place, self._now)
            else:
                self._submit(event.place)
        return Replay(self._program, self._start, self._entered, self._end, self._begin_of, self._end_of)

    def _submit(self, place: int) -> None:
        stage = self._program.stages[place]
        start = np.maximum(self._now, self._free[stage.lane])
        for earlier in stage.after:
            start = np.maximum(start, self._end[earlier])
        self._free[stage.lane] = self._run_stage(place, start)

    def _run_stage(self, place: int, start: Times) -> Times:
        stage = self._program.stages[place]
        self._start[place] = time = start
        scope: Scope = "rank"
        for operation in stage.operations:
            cost = self._costs.of(operation, stage.step, stage.micro_batch)
            time = time + cost.busy_s
            if cost.scope != "rank":
                scope = cost.scope if scope == "rank" else scope
                time = self._mesh.joined(time, cost.scope)
                # The link is a bucket of tokens: `_sent` is when it will have sent what it was given, had it been full.
                self._sent = np.maximum(self._sent, time - cost.burst_s) + cost.wire_s
                time = np.maximum(time, self._sent) + cost.latency_s
        self._entered[place] = self._mesh.joined(start, scope)
        self._end[place] = time
        return time


class _Spans:
    """Walks through the program again, along one rank."""

    def __init__(self, replayed: Replay, rank: int) -> None:
        self._replay = replayed
        self._rank = rank
        self._program = replayed.program
        self._start = replayed.start[:, rank]
        self._end = replayed.end[:, rank]
        self._spans: list[Span] = []
        self._ids = len(self._program.stages)

    def walk(self) -> list[Span]:
        now = 0.0
        begin = 0.0
        step_now = 0
        free: dict[str, float] = defaultdict(float)
        for event in self._program.events:
            if event.kind == "begin":
                now = begin = float(self._replay.begin_of[event.place][self._rank])
                step_now = event.place
            elif event.kind == "end":
                self._add("train.step", "step", "compute", start=begin, end=now, step=event.place)
            elif event.kind == "wait":
                now = self._wait("compute", event.place, now, step_now)
            elif event.kind == "work":
                self._stage(event.place)
                now = float(self._end[event.place])
            else:
                stage = self._program.stages[event.place]
                ready = max(now, free[stage.lane])
                for earlier in stage.after:
                    ready = self._wait(stage.lane, earlier, ready, stage.step)
                self._stage(event.place)
                free[stage.lane] = float(self._end[event.place])
        return self._spans

    def _stage(self, place: int) -> None:
        stage = self._program.stages[place]
        self._spans.append(_span(stage, place, self._rank, float(self._start[place]), float(self._end[place])))
        if stage.is_collective:
            entered = float(self._replay.entered[place, self._rank])
            self._spans.append(_span(stage, place, EVERYONE, entered, entered))

    def _wait(self, lane: str, awaited: int, now: float, step: int) -> float:
        end = float(self._end[awaited])
        if end > now:
            self._add("wait", "wait", lane, start=now, end=end, step=step, awaits=awaited)
        return max(now, end)

    def _add(self, name: str, kind: Literal["step", "wait"], lane: str, **fields: Any) -> None:
        self._ids += 1
        fields |= {"start_ns": _ns(fields.pop("start")), "end_ns": _ns(fields.pop("end"))}
        self._spans.append(Span(id=self._ids, name=name, kind=kind, lane=lane, rank=self._rank, **fields))


def _span(stage: Stage, place: int, rank: int, start: float, end: float) -> Span:
    return Span(
        id=place,
        name=stage.name,
        kind=stage.kind,
        lane=stage.lane,
        start_ns=_ns(start),
        end_ns=_ns(end),
        rank=rank,
        step=stage.step,
        micro_batch=stage.micro_batch,
        is_collective=stage.is_collective,
    )


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _mean(values: list[int]) -> int:
    return round(sum(values) / len(values))
