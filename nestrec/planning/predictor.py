"""What a candidate would do on a cluster: time, parts, memory, bytes, and what bounds it."""

import functools
from dataclasses import dataclass, replace

import numpy as np

from nestrec.embedding.routing.replica_key_union import ReplicaSyncConfig
from nestrec.pipeline import PipelineConfig
from nestrec.planning.cluster_config import ClusterConfig
from nestrec.planning.hardware_profile import Group, Links, Profile
from nestrec.planning.recipe_workload import expected_loads
from nestrec.planning.search_space import Candidate
from nestrec.planning.simulator.program import Program
from nestrec.planning.simulator.program_replay import Mesh, Replay, replay
from nestrec.planning.simulator.rehearsal import rehearse
from nestrec.planning.simulator.shared_cores import Hosts, replay_shared
from nestrec.planning.simulator.step_costs import ScaledCosts, StepCosts
from nestrec.planning.tier_memory import Memory, Tier, memory_of
from nestrec.planning.workload import KEY_BYTES, Loads, Workload
from nestrec.trace import StepParts

STEPS = 8
_MOST_SHARED_RANKS = 8
"""Ranks whose cores are shared moment by moment; of more, all work of a host with too few is slower at all times."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """A candidate and its predicted figures."""

    candidate: Candidate
    step_s: float
    """from the end of a step to the end of the next"""
    parts: StepParts
    """of the slowest rank"""
    mfu: float
    """model operations of all devices over what they could do in the time, 0 to 1"""
    memory: dict[Tier, Memory]
    """of the rank that needs most"""
    link_bytes: dict[str, float]
    """that a rank sends through each level in a step"""
    samples_s: float
    """of the whole cluster"""

    @property
    def fits(self) -> bool:
        return all(memory.missing == 0 for memory in self.memory.values())

    @property
    def missing_bytes(self) -> float:
        return sum(memory.missing for memory in self.memory.values())

    @property
    def bound_by(self) -> str:
        """The largest part of the step."""
        parts = {
            "compute": self.parts.compute_ns,
            "lookup": self.parts.exposed_lookup_ns,
            "communication": self.parts.exposed_communication_ns,
            "waiting for other ranks": self.parts.idle_ns,
        }
        return max(parts, key=lambda name: parts[name])


class Predictor:
    """Predicts candidates of one recipe on one cluster; what they have in common is made once."""

    def __init__(self, workload: Workload, cluster: ClusterConfig, *, seed: int = 0) -> None:
        self.workload = workload
        self.cluster = cluster
        self._seed = seed
        self._loads = functools.lru_cache(maxsize=64)(self._make_loads)
        self.outcomes: dict[Candidate, Prediction] = {}

    def predict(self, candidate: Candidate) -> Prediction:
        if candidate not in self.outcomes:
            self.outcomes[candidate] = self._predict(candidate)
        return self.outcomes[candidate]

    def loads(self, candidate: Candidate) -> Loads:
        c = candidate
        return self._loads(c.replicas, c.micro_batches, c.policy, c.window_cache)

    def memory(self, candidate: Candidate) -> dict[Tier, Memory]:
        """Alone: nothing is replayed."""
        return memory_of(
            self.workload,
            self.loads(candidate),
            self.mesh(candidate),
            self.cluster,
            store=candidate.store,
            window_cache=candidate.window_cache,
            buffers=buffers_of(program_of(candidate, STEPS)),
        )

    def mesh(self, candidate: Candidate) -> Mesh:
        return Mesh(candidate.replicas, self.cluster.world // candidate.replicas)

    def replayed(self, candidate: Candidate, steps: int = STEPS) -> Replay:
        """The steps themselves."""
        program = program_of(candidate, steps)
        mesh = self.mesh(candidate)
        hands_over = any("train.embedding.copy" in stage.operations for stage in program.stages)
        costs = StepCosts(
            self.loads(candidate),
            self._profile(candidate, program),
            self._links(candidate),
            mesh,
            store=candidate.store,
            hands_over=hands_over,
        )
        host = self.cluster.host
        if self.cluster.shares_cores and mesh.world <= _MOST_SHARED_RANKS:
            hosts = Hosts(ranks=host.ranks, cores=host.cores, crowding=host.crowding)
            return replay_shared(program, costs, mesh, hosts)
        if self.cluster.shares_cores and host.ranks > host.cores:
            return replay(program, ScaledCosts(costs, host.ranks / host.cores * (1.0 + host.crowding)), mesh)
        return replay(program, costs, mesh)

    def _links(self, candidate: Candidate) -> Links:
        links = self.cluster.link_model()
        limit = self.cluster.host.copy_gb_per_s  # of ranks on CPUs the links are those of the host as they are
        return links.capped(limit) if candidate.transport == "host" and limit else links

    def _profile(self, candidate: Candidate, program: Program) -> Profile:
        """Kernels that run beside collectives are slower; in a serial step nothing runs beside anything."""
        profile = self.cluster.profile
        slowdown = self.cluster.device.collective_slowdown
        overlaps = any(event.kind == "submit" for event in program.events)
        if candidate.transport != "collectives" or not overlaps or slowdown == 0:
            return profile
        rates = profile.compute
        slowed = replace(
            rates, flop_s=rates.flop_s * (1 + slowdown), attention_flop_s=rates.attention_flop_s * (1 + slowdown)
        )
        return replace(profile, compute=slowed)

    def _predict(self, candidate: Candidate) -> Prediction:
        done = self.replayed(candidate)
        loads = self.loads(candidate)
        step_s = done.pace_s()
        flops = float((loads.linear_flops + loads.attention_flops).sum(axis=(1, 2)).mean())
        peak = self.cluster.device.peak_tflops * 1e12 * self.cluster.world
        return Prediction(
            candidate=candidate,
            step_s=step_s,
            parts=done.parts(done.slowest()),
            mfu=flops / (step_s * peak),
            memory=self.memory(candidate),
            link_bytes=self._link_bytes(candidate, loads),
            samples_s=self.workload.batch_samples / step_s,
        )

    def _link_bytes(self, candidate: Candidate, loads: Loads) -> dict[str, float]:
        """Keys, vectors and gradients, and the sums over replicas and over everyone."""
        links = self.cluster.link_model()
        mesh = self.mesh(candidate)
        exchanged = loads.asked * KEY_BYTES + loads.served_bytes + loads.returned_bytes
        total = links.bytes_leaving(Group(mesh.num_shards), float(exchanged.sum(axis=2).mean()))
        holders = mesh.num_replicas * float(loads.completed_bytes.sum(axis=2).mean())
        copies = links.bytes_leaving(Group(mesh.num_replicas, mesh.num_shards), holders)
        reduced = links.bytes_reduced(Group(mesh.world), loads.dense_bytes)
        return {name: total[name] + copies[name] + reduced[name] for name in total}

    def _make_loads(self, replicas: int, micro_batches: int, policy: str, window_cache: bool) -> Loads:
        mesh = Mesh(replicas, self.cluster.world // replicas)
        return expected_loads(
            self.workload, mesh, micro_batches=micro_batches, policy=policy, window_cache=window_cache, seed=self._seed
        )


def program_of(candidate: Candidate, steps: int) -> Program:
    options = PipelineConfig(schedule=candidate.schedule, window_cache=candidate.window_cache)
    sync = ReplicaSyncConfig() if candidate.replicas > 1 else None
    return rehearse(options, micro_batches=candidate.micro_batches, steps=steps, replica_sync=sync)


def buffers_of(program: Program) -> int:
    """Working sets that are held at a time: fetched and not yet written back, in the order of submission."""
    change = [
        sum(op in ("fetch", "read_ahead") for op in stage.operations) - ("write_back" in stage.operations)
        for stage in program.stages
    ]
    return int(np.cumsum(change).max())
