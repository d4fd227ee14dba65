"""Replays a program with a cost model on many ranks at once: one array of times per stage, one element per rank.

Stages are processed in the order of the program. A stage starts when its lane is free, the stages it depends on have
ended and it has been submitted; a collective also waits for the last rank of its group. Lanes of a real run follow the
same rules.
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
"""Ranks that take part: one rank, a replica group, the replicas of a shard, or all ranks."""
EVERYONE = -1
"""Rank number in spans that represents the last rank to enter a collective."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Duration of an operation in seconds: one number, or one per rank."""

    busy_s: float | Times = 0.0
    """Busy time of the core or device."""
    wire_s: float | Times = 0.0
    """Busy time of the link, which starts when the last rank of the scope has arrived."""
    scope: Scope = "rank"
    """Ranks that take part."""
    latency_s: float = 0.0
    """Latency after the transfer."""
    burst_s: float = 0.0
    """Link time that passes without delay after a pause of the same length (token bucket)."""


class Costs(Protocol):
    """Cost model of operations."""

    def of(self, operation: str, step: int, micro_batch: int | None) -> Cost:
        """Return the cost of an operation."""
        ...


@dataclass(frozen=True, slots=True)
class Mesh:
    """Device mesh with the axes replica and shard: rank = replica * num_shards + shard."""

    num_replicas: int
    num_shards: int

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.num_replicas * self.num_shards

    def latest_of_group(self, times: Times, scope: Scope) -> Times:
        """Return, for each rank, the time at which the last rank of its group arrives."""
        if scope == "rank" or self.world == 1:
            return times
        if scope == "all":
            return np.full_like(times, times.max())
        grid = times.reshape(self.num_replicas, self.num_shards)
        last = grid.max(axis=1 if scope == "shards" else 0, keepdims=True)
        return np.broadcast_to(last, grid.shape).reshape(-1)


@dataclass(frozen=True, slots=True)
class Replay:
    """Simulated timeline, in seconds from the start."""

    program: Program
    start: Times
    """(stages, ranks) start of each stage."""
    entered: Times
    """(stages, ranks) time at which the last rank of the group entered a collective."""
    end: Times
    """(stages, ranks) end of each stage."""
    step_start_s: dict[int, Times]
    """(ranks,) start of each step, by step number."""
    step_end_s: dict[int, Times]
    """(ranks,) end of each step, by step number."""

    def middle(self) -> tuple[int, ...]:
        """Return the steps that neither fill nor drain the pipeline."""
        return self.program.steps[1:-1]

    def step_s(self) -> Times:
        """Return the (ranks,) mean duration of the middle steps."""
        steps = self.middle()
        mean: Times = np.stack([self.step_end_s[step] - self.step_start_s[step] for step in steps]).mean(axis=0)
        return mean

    def pace_s(self) -> float:
        """Return the mean time between the ends of successive steps, which determines the throughput."""
        first, last = self.middle()[0], self.middle()[-1]
        return float((self.step_end_s[last] - self.step_start_s[first]).mean()) / (last - first + 1)

    def slowest(self) -> int:
        """Return the rank with the longest steps."""
        return int(self.step_s().argmax())

    def spans(self, rank: int) -> list[Span]:
        """Return the trace of a rank in the format of a real run; entries into collectives have the rank `EVERYONE`."""
        return _Spans(self, rank).walk()

    def parts(self, rank: int) -> StepParts:
        """Return the mean breakdown of the middle steps on a rank."""
        timeline = Timeline(self.spans(rank))
        parts = [timeline.parts(step, rank) for step in self.middle()]
        return StepParts(
            compute_ns=_mean([p.compute_ns for p in parts]),
            exposed_lookup_ns=_mean([p.exposed_lookup_ns for p in parts]),
            exposed_communication_ns=_mean([p.exposed_communication_ns for p in parts]),
            idle_ns=_mean([p.idle_ns for p in parts]),
        )


def replay(program: Program, costs: Costs, mesh: Mesh) -> Replay:
    """Replay a program on all ranks of a mesh, each with a core or device of its own for every lane."""
    return _Replayer(program, costs, mesh).run()


class _Replayer:
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
                self._begin_of[event.index] = self._now
            elif event.kind == "end":
                self._end_of[event.index] = self._now
            elif event.kind == "wait":
                self._now = np.maximum(self._now, self._end[event.index])
            elif event.kind == "work":
                self._now = self._run_stage(event.index, self._now)
            else:
                self._submit(event.index)
        return Replay(self._program, self._start, self._entered, self._end, self._begin_of, self._end_of)

    def _submit(self, index: int) -> None:
        stage = self._program.stages[index]
        start = np.maximum(self._now, self._free[stage.lane])
        for earlier in stage.after:
            start = np.maximum(start, self._end[earlier])
        self._free[stage.lane] = self._run_stage(index, start)

    def _run_stage(self, index: int, start: Times) -> Times:
        stage = self._program.stages[index]
        self._start[index] = time = start
        scope: Scope = "rank"
        for operation in stage.operations:
            cost = self._costs.of(operation, stage.step, stage.micro_batch)
            time = time + cost.busy_s
            if cost.scope != "rank":
                scope = cost.scope if scope == "rank" else scope
                time = self._mesh.latest_of_group(time, cost.scope)
                # The link is a token bucket: `_sent` is the time at which all its bytes have been sent.
                self._sent = np.maximum(self._sent, time - cost.burst_s) + cost.wire_s
                time = np.maximum(time, self._sent) + cost.latency_s
        self._entered[index] = self._mesh.latest_of_group(start, scope)
        self._end[index] = time
        return time


class _Spans:
    """Builds the spans of one rank by walking through the program again."""

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
                now = begin = float(self._replay.step_start_s[event.index][self._rank])
                step_now = event.index
            elif event.kind == "end":
                self._add("train.step", "step", "compute", start=begin, end=now, step=event.index)
            elif event.kind == "wait":
                now = self._wait("compute", event.index, now, step_now)
            elif event.kind == "work":
                self._stage(event.index)
                now = float(self._end[event.index])
            else:
                stage = self._program.stages[event.index]
                ready = max(now, free[stage.lane])
                for earlier in stage.after:
                    ready = self._wait(stage.lane, earlier, ready, stage.step)
                self._stage(event.index)
                free[stage.lane] = float(self._end[event.index])
        return self._spans

    def _stage(self, index: int) -> None:
        stage = self._program.stages[index]
        self._spans.append(_span(stage, index, self._rank, float(self._start[index]), float(self._end[index])))
        if stage.is_collective:
            entered = float(self._replay.entered[index, self._rank])
            self._spans.append(_span(stage, index, EVERYONE, entered, entered))

    def _wait(self, lane: str, awaited: int, now: float, step: int) -> float:
        end = float(self._end[awaited])
        if end > now:
            self._add("wait", "wait", lane, start=now, end=end, step=step, awaits=awaited)
        return max(now, end)

    def _add(self, name: str, kind: Literal["step", "wait"], lane: str, **fields: Any) -> None:
        self._ids += 1
        fields |= {"start_ns": _ns(fields.pop("start")), "end_ns": _ns(fields.pop("end"))}
        self._spans.append(Span(id=self._ids, name=name, kind=kind, lane=lane, rank=self._rank, **fields))


def _span(stage: Stage, index: int, rank: int, start: float, end: float) -> Span:
    return Span(
        id=index,
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
