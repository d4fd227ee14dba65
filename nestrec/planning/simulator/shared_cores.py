"""Event-driven replay of a program on ranks that share the cores of a host; active lanes get equal shares of the cores.

It is meant for few ranks. If no host has more active lanes than cores, the result equals that of `replay`.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field

import numpy as np

from nestrec.planning.simulator.program import Program, Stage
from nestrec.planning.simulator.program_replay import Cost, Costs, Mesh, Replay, Scope, Times

_NEVER = float("inf")
_DONE_S = 1e-12


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosts:
    """Assignment of ranks to hosts with shared cores."""

    ranks: int
    """Number of ranks per host."""
    cores: float
    """Number of cores per host."""
    contention: float = 0.0
    """Relative slowdown of work while more lanes are active than cores (caches, context switches)."""

    def rate(self, num_working: int) -> float:
        """Return the speed of each active lane of a host, relative to a lane with a core of its own."""
        if num_working <= self.cores:
            return 1.0
        return self.cores / num_working / (1.0 + self.contention)


@dataclass(slots=True)
class _Lane:
    """State of one lane (thread) of a rank."""

    rank: int
    stages: deque[int] = field(default_factory=deque)
    running: int | None = None
    operations: deque[Cost] = field(default_factory=deque)
    busy_left: float = 0.0
    wire_until: float = _NEVER
    joins: tuple[int, int] | None = None
    """Stage and operation of the collective that the lane is in."""


def replay_shared(program: Program, costs: Costs, mesh: Mesh, hosts: Hosts) -> Replay:
    """Replay a program on ranks that share cores; neighboring ranks are on the same host.

    Args:
        program: Recorded program.
        costs: Cost model of its operations.
        mesh: Device mesh.
        hosts: Ranks and cores per host.
    """
    return _Simulation(program, costs, mesh, hosts).run()


class _Simulation:
    def __init__(self, program: Program, costs: Costs, mesh: Mesh, hosts: Hosts) -> None:
        self._program = program
        self._costs = costs
        self._mesh = mesh
        self._hosts = hosts
        shape = (len(program.stages), mesh.world)
        self._start = np.full(shape, _NEVER)
        self._entered = np.zeros(shape)
        self._end = np.full(shape, _NEVER)
        self._now = 0.0
        self._sent = [-_NEVER] * mesh.world
        names = ["compute", *dict.fromkeys(s.lane for s in program.stages if s.lane != "compute")]
        self._lanes = {(rank, name): _Lane(rank) for rank in range(mesh.world) for name in names}
        self._next_index = [0] * mesh.world
        self._begin_of = {step: np.zeros(mesh.world) for step in program.steps}
        self._end_of = {step: np.zeros(mesh.world) for step in program.steps}
        self._arrived: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
        self._members = {scope: _groups(mesh, scope) for scope in ("rank", "shards", "replicas", "all")}

    def run(self) -> Replay:
        while True:
            while self._run_instant():
                pass
            if all(index == len(self._program.events) for index in self._next_index) and not self._is_busy():
                break
            self._advance()
        for index, stage in enumerate(self._program.stages):
            self._entered[index] = self._mesh.latest_of_group(self._start[index], self._scope_of(stage))
        return Replay(self._program, self._start, self._entered, self._end, self._begin_of, self._end_of)

    def _is_busy(self) -> bool:
        return any(lane.running is not None or lane.stages for lane in self._lanes.values())

    def _run_instant(self) -> bool:
        """Process everything that takes no time at the current moment; return whether anything changed."""
        progressed = False
        for (rank, name), lane in self._lanes.items():
            if lane.running is not None:
                progressed |= self._continue_stage(lane)
            elif name == "compute":
                progressed |= self._next_event(rank, lane)
            elif lane.stages and self._is_ready(lane.stages[0], rank):
                self._start_stage(lane, lane.stages.popleft())
                progressed = True
        return progressed

    def _is_ready(self, index: int, rank: int) -> bool:
        return all(self._end[earlier, rank] <= self._now for earlier in self._program.stages[index].after)

    def _next_event(self, rank: int, lane: _Lane) -> bool:
        if self._next_index[rank] == len(self._program.events):
            return False
        event = self._program.events[self._next_index[rank]]
        if event.kind == "wait" and self._end[event.index, rank] > self._now:
            return False
        self._next_index[rank] += 1
        if event.kind == "begin":
            self._begin_of[event.index][rank] = self._now
        elif event.kind == "end":
            self._end_of[event.index][rank] = self._now
        elif event.kind == "work":
            self._start_stage(lane, event.index)
        elif event.kind == "submit":
            self._lanes[rank, self._program.stages[event.index].lane].stages.append(event.index)
        return True

    def _start_stage(self, lane: _Lane, index: int) -> None:
        stage = self._program.stages[index]
        self._start[index, lane.rank] = self._now
        lane.running = index
        costs = [self._costs.of(operation, stage.step, stage.micro_batch) for operation in stage.operations]
        lane.operations = deque(costs)
        lane.busy_left = _rank_value(costs[0].busy_s, lane.rank)
        lane.wire_until = _NEVER
        lane.joins = None

    def _continue_stage(self, lane: _Lane) -> bool:
        """Continue a stage: from work to transfer, to the next operation, or to the end of the stage."""
        assert lane.running is not None
        if lane.busy_left > _DONE_S:
            return False
        cost = lane.operations[0]
        if cost.scope != "rank" and lane.wire_until == _NEVER:
            if not self._has_joined(lane, cost):
                return False
            sent = max(self._sent[lane.rank], self._now - cost.burst_s) + _rank_value(cost.wire_s, lane.rank)
            self._sent[lane.rank] = sent
            lane.wire_until = max(self._now, sent) + cost.latency_s
            return True  # other ranks of the group may have been checked before this rank arrived
        if cost.scope != "rank" and lane.wire_until > self._now + _DONE_S:
            return False
        lane.operations.popleft()
        lane.wire_until = _NEVER
        lane.joins = None
        if lane.operations:
            lane.busy_left = _rank_value(lane.operations[0].busy_s, lane.rank)
        else:
            self._end[lane.running, lane.rank] = self._now
            lane.running = None
        return True

    def _has_joined(self, lane: _Lane, cost: Cost) -> bool:
        assert lane.running is not None
        barrier = (lane.running, len(lane.operations))
        self._arrived[barrier].setdefault(lane.rank, self._now)
        return all(member in self._arrived[barrier] for member in self._members[cost.scope][lane.rank])

    def _advance(self) -> None:
        """Advance the clock to the next end of work or of a transfer."""
        working = defaultdict(list)
        for lane in self._lanes.values():
            if lane.running is not None and lane.busy_left > _DONE_S:
                working[lane.rank // self._hosts.ranks].append(lane)
        rates = {host: self._hosts.rate(len(lanes)) for host, lanes in working.items()}
        ends = [lane.busy_left / rates[host] for host, lanes in working.items() for lane in lanes]
        ends += [lane.wire_until - self._now for lane in self._lanes.values() if lane.wire_until < _NEVER]
        assert ends, "deadlock: no lane is active, but the program has not ended"
        passed = min(ends)
        for host, lanes in working.items():
            for lane in lanes:
                lane.busy_left -= passed * rates[host]
        self._now += passed

    def _scope_of(self, stage: Stage) -> Scope:
        scopes = [self._costs.of(operation, stage.step, stage.micro_batch).scope for operation in stage.operations]
        return next((scope for scope in scopes if scope != "rank"), "rank")


def _rank_value(value: float | Times, rank: int) -> float:
    return float(value[rank]) if isinstance(value, np.ndarray) else float(value)


def _groups(mesh: Mesh, scope: Scope) -> list[list[int]]:
    """Return, for each rank, the ranks of its group."""
    ranks = np.arange(mesh.world, dtype=np.float64)
    group_of = {
        "rank": ranks,
        "all": ranks * 0,
        "shards": ranks // mesh.num_shards,
        "replicas": ranks % mesh.num_shards,
    }
    return [np.flatnonzero(group_of[scope] == group_of[scope][rank]).tolist() for rank in range(mesh.world)]
