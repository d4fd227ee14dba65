"""Replays a program on ranks that share the cores of a host: the lanes that work get equal parts of them.

An event-driven twin of `replay` for few ranks. Where no host has more working lanes than cores, both give the same.
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
    """How ranks share machines."""

    ranks: int
    """of a host"""
    cores: float
    """of a host"""
    crowding: float = 0.0
    """extra time of work, as a part of it, while more lanes work than there are cores: caches, switches"""

    def rate(self, num_working: int) -> float:
        """Speed of each of the working lanes of a host."""
        if num_working <= self.cores:
            return 1.0
        return self.cores / num_working / (1.0 + self.crowding)


@dataclass(slots=True)
class _Lane:
    """A thread of a rank."""

    rank: int
    stages: deque[int] = field(default_factory=deque)
    running: int | None = None
    operations: deque[Cost] = field(default_factory=deque)
    busy_left: float = 0.0
    wire_until: float = _NEVER
    joins: tuple[int, int] | None = None
    """(stage, number of the operation) of the collective that it is in"""


def replay_shared(program: Program, costs: Costs, mesh: Mesh, hosts: Hosts) -> Replay:
    """Ranks in hosts, neighbours together."""
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
        self._place = [0] * mesh.world
        self._begin_of = {step: np.zeros(mesh.world) for step in program.steps}
        self._end_of = {step: np.zeros(mesh.world) for step in program.steps}
        self._arrived: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
        self._members = {scope: _groups(mesh, scope) for scope in ("rank", "shards", "replicas", "all")}

    def run(self) -> Replay:
        while True:
            while self._settle():
                pass
            if all(place == len(self._program.events) for place in self._place) and not self._is_busy():
                break
            self._advance()
        for place, stage in enumerate(self._program.stages):
            self._entered[place] = self._mesh.joined(self._start[place], self._scope_of(stage))
        return Replay(self._program, self._start, self._entered, self._end, self._begin_of, self._end_of)

    def _is_busy(self) -> bool:
        return any(lane.running is not None or lane.stages for lane in self._lanes.values())

    def _settle(self) -> bool:
        """Do what takes no time; whether anything was done."""
        moved = False
        for (rank, name), lane in self._lanes.items():
            if lane.running is not None:
                moved |= self._go_on(lane)
            elif name == "compute":
                moved |= self._next_event(rank, lane)
            elif lane.stages and self._is_ready(lane.stages[0], rank):
                self._begin(lane, lane.stages.popleft())
                moved = True
        return moved

    def _is_ready(self, place: int, rank: int) -> bool:
        return all(self._end[earlier, rank] <= self._now for earlier in self._program.stages[place].after)

    def _next_event(self, rank: int, lane: _Lane) -> bool:
        if self._place[rank] == len(self._program.events):
            return False
        event = self._program.events[self._place[rank]]
        if event.kind == "wait" and self._end[event.place, rank] > self._now:
            return False
        self._place[rank] += 1
        if event.kind == "begin":
            self._begin_of[event.place][rank] = self._now
        elif event.kind == "end":
            self._end_of[event.place][rank] = self._now
        elif event.kind == "work":
            self._begin(lane, event.place)
        elif event.kind == "submit":
            self._lanes[rank, self._program.stages[event.place].lane].stages.append(event.place)
        return True

    def _begin(self, lane: _Lane, place: int) -> None:
        stage = self._program.stages[place]
        self._start[place, lane.rank] = self._now
        lane.running = place
        found = [self._costs.of(operation, stage.step, stage.micro_batch) for operation in stage.operations]
        lane.operations = deque(found)
        lane.busy_left = _of_rank(found[0].busy_s, lane.rank)
        lane.wire_until = _NEVER
        lane.joins = None

    def _go_on(self, lane: _Lane) -> bool:
        """From work to the wire, from one operation to the next, from the last one to the end of the stage."""
        assert lane.running is not None
        if lane.busy_left > _DONE_S:
            return False
        cost = lane.operations[0]
        if cost.scope != "rank" and lane.wire_until == _NEVER:
            if not self._has_joined(lane, cost):
                return False
            sent = max(self._sent[lane.rank], self._now - cost.burst_s) + _of_rank(cost.wire_s, lane.rank)
            self._sent[lane.rank] = sent
            lane.wire_until = max(self._now, sent) + cost.latency_s
            return True  # others of the group may have looked before this rank came
        if cost.scope != "rank" and lane.wire_until > self._now + _DONE_S:
            return False
        lane.operations.popleft()
        lane.wire_until = _NEVER
        lane.joins = None
        if lane.operations:
            lane.busy_left = _of_rank(lane.operations[0].busy_s, lane.rank)
        else:
            self._end[lane.running, lane.rank] = self._now
            lane.running = None
        return True

    def _has_joined(self, lane: _Lane, cost: Cost) -> bool:
        assert lane.running is not None
        meeting = (lane.running, len(lane.operations))
        self._arrived[meeting].setdefault(lane.rank, self._now)
        return all(member in self._arrived[meeting] for member in self._members[cost.scope][lane.rank])

    def _advance(self) -> None:
        """To the next moment at which a piece of work or a transfer ends."""
        working = defaultdict(list)
        for lane in self._lanes.values():
            if lane.running is not None and lane.busy_left > _DONE_S:
                working[lane.rank // self._hosts.ranks].append(lane)
        rates = {host: self._hosts.rate(len(lanes)) for host, lanes in working.items()}
        ends = [lane.busy_left / rates[host] for host, lanes in working.items() for lane in lanes]
        ends += [lane.wire_until - self._now for lane in self._lanes.values() if lane.wire_until < _NEVER]
        assert ends, "nothing runs, and not everything is done"
        passed = min(ends)
        for host, lanes in working.items():
            for lane in lanes:
                lane.busy_left -= passed * rates[host]
        self._now += passed

    def _scope_of(self, stage: Stage) -> Scope:
        scopes = [self._costs.of(operation, stage.step, stage.micro_batch).scope for operation in stage.operations]
        return next((scope for scope in scopes if scope != "rank"), "rank")


def _of_rank(value: float | Times, rank: int) -> float:
    return float(value[rank]) if isinstance(value, np.ndarray) else float(value)


def _groups(mesh: Mesh, scope: Scope) -> list[list[int]]:
    """For each rank the ranks that it meets."""
    ranks = np.arange(mesh.world, dtype=np.float64)
    name = {"rank": ranks, "all": ranks * 0, "shards": ranks // mesh.num_shards, "replicas": ranks % mesh.num_shards}
    return [np.flatnonzero(name[scope] == name[scope][rank]).tolist() for rank in range(mesh.world)]
