"""Predicts step time, its breakdown, memory and traffic of a candidate on a cluster, by simulation."""

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
from nestrec.planning.tier_memory import Memory, Tier, estimate_memory
from nestrec.planning.workload import KEY_BYTES, Loads, Workload
from nestrec.trace import StepParts

STEPS = 8
_MOST_SHARED_RANKS = 8
"""Maximum number of ranks for the event-driven simulation of shared cores; with more ranks, all work on hosts with too
few cores is slowed down by a constant factor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Predicted performance of a candidate."""

    candidate: Candidate
    step_s: float
    """Mean time between the ends of successive steps, in seconds."""
    parts: StepParts
    """Breakdown of a step on the slowest rank."""
    mfu: float
    """Model FLOPs utilization of all devices, from 0 to 1."""
    memory: dict[Tier, Memory]
    """Memory by tier of the rank that needs most."""
    link_bytes: dict[str, float]
    """Bytes that a rank sends per step, by link level."""
    samples_s: float
    """Samples per second of the whole cluster."""

    @property
    def fits(self) -> bool:
        """Whether every tier has enough memory."""
        return all(memory.missing == 0 for memory in self.memory.values())

    @property
    def missing_bytes(self) -> float:
        """Bytes that are missing in all tiers of a rank."""
        return sum(memory.missing for memory in self.memory.values())

    @property
    def bound_by(self) -> str:
        """Bottleneck: the largest part of the step."""
        parts = {
            "compute": self.parts.compute_ns,
            "lookup": self.parts.exposed_lookup_ns,
            "communication": self.parts.exposed_communication_ns,
            "waiting for other ranks": self.parts.idle_ns,
        }
        return max(parts, key=lambda name: parts[name])


class Predictor:
    """Predicts candidates of one recipe on one cluster. Predictions and their common inputs are cached.

    Args:
        workload: The recipe, as `measure_workload` measures it.
        cluster: The cluster.
        seed: Seed of the sampled sequence lengths.
    """

    def __init__(self, workload: Workload, cluster: ClusterConfig, *, seed: int = 0) -> None:
        self.workload = workload
        self.cluster = cluster
        self._seed = seed
        self._loads = functools.lru_cache(maxsize=64)(self._make_loads)
        self.outcomes: dict[Candidate, Prediction] = {}

    def predict(self, candidate: Candidate) -> Prediction:
        """Return the predicted performance of a candidate."""
        if candidate not in self.outcomes:
            self.outcomes[candidate] = self._predict(candidate)
        return self.outcomes[candidate]

    def loads(self, candidate: Candidate) -> Loads:
        """Return the amounts of work of each rank."""
        c = candidate
        return self._loads(c.replicas, c.micro_batches, c.policy, c.window_cache)

    def memory(self, candidate: Candidate) -> dict[Tier, Memory]:
        """Return the memory by tier, without simulating any step."""
        return estimate_memory(
            self.workload,
            self.loads(candidate),
            self.mesh(candidate),
            self.cluster,
            store=candidate.store,
            window_cache=candidate.window_cache,
            buffers=count_buffers(record_program(candidate, STEPS)),
        )

    def mesh(self, candidate: Candidate) -> Mesh:
        """Return the device mesh of a candidate."""
        return Mesh(candidate.replicas, self.cluster.world // candidate.replicas)

    def replay(self, candidate: Candidate, steps: int = STEPS) -> Replay:
        """Simulate some steps of a candidate and return their timeline."""
        program = record_program(candidate, steps)
        mesh = self.mesh(candidate)
        hands_over = any("train.embedding.copy_shared_rows" in stage.operations for stage in program.stages)
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
            hosts = Hosts(ranks=host.ranks, cores=host.cores, contention=host.core_contention)
            return replay_shared(program, costs, mesh, hosts)
        if self.cluster.shares_cores and host.ranks > host.cores:
            return replay(program, ScaledCosts(costs, host.ranks / host.cores * (1.0 + host.core_contention)), mesh)
        return replay(program, costs, mesh)

    def _links(self, candidate: Candidate) -> Links:
        links = self.cluster.link_model()
        limit = self.cluster.host.host_copy_gb_per_s  # 0 for CPU ranks, whose links are host links already
        return links.limited_to(limit) if candidate.transport == "host" and limit else links

    def _profile(self, candidate: Candidate, program: Program) -> Profile:
        """Return the profile of the cluster, with slower kernels if collectives run concurrently (NCCL uses the same
        multiprocessors); in a serial schedule nothing overlaps."""
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
        timeline = self.replay(candidate)
        loads = self.loads(candidate)
        step_s = timeline.pace_s()
        flops = float((loads.linear_flops + loads.attention_flops).sum(axis=(1, 2)).mean())
        peak = self.cluster.device.peak_tflops * 1e12 * self.cluster.world
        return Prediction(
            candidate=candidate,
            step_s=step_s,
            parts=timeline.parts(timeline.slowest()),
            mfu=flops / (step_s * peak),
            memory=self.memory(candidate),
            link_bytes=self._link_bytes(candidate, loads),
            samples_s=self.workload.batch_samples / step_s,
        )

    def _link_bytes(self, candidate: Candidate, loads: Loads) -> dict[str, float]:
        """Return the bytes of keys, embeddings and gradients, and of the gradient sums over replicas and all ranks."""
        links = self.cluster.link_model()
        mesh = self.mesh(candidate)
        exchanged = loads.requested_keys * KEY_BYTES + loads.served_bytes + loads.returned_bytes
        total = links.bytes_leaving(Group(mesh.num_shards), float(exchanged.sum(axis=2).mean()))
        replica_bytes = mesh.num_replicas * float(loads.completed_bytes.sum(axis=2).mean())
        copies = links.bytes_leaving(Group(mesh.num_replicas, mesh.num_shards), replica_bytes)
        reduced = links.bytes_reduced(Group(mesh.world), loads.dense_bytes)
        return {name: total[name] + copies[name] + reduced[name] for name in total}

    def _make_loads(self, replicas: int, micro_batches: int, policy: str, window_cache: bool) -> Loads:
        mesh = Mesh(replicas, self.cluster.world // replicas)
        return expected_loads(
            self.workload, mesh, micro_batches=micro_batches, policy=policy, window_cache=window_cache, seed=self._seed
        )


def record_program(candidate: Candidate, steps: int) -> Program:
    """Return the recorded program of a candidate's schedule."""
    options = PipelineConfig(schedule=candidate.schedule, window_cache=candidate.window_cache)
    sync = ReplicaSyncConfig() if candidate.replicas > 1 else None
    return rehearse(options, micro_batches=candidate.micro_batches, steps=steps, replica_sync=sync)


def count_buffers(program: Program) -> int:
    """Return the maximum number of working sets that are fetched and not yet written back."""
    change = [
        sum(op in ("fetch_rows", "prefetch_rows") for op in stage.operations) - ("write_back" in stage.operations)
        for stage in program.stages
    ]
    return int(np.cumsum(change).max())
