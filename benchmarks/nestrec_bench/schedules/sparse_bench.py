"""Measure the effects of rows that consecutive batches or replica groups share: exposed communication, sync and memory.

collisions    serial, priority, semi_async and nested with a growing share of rows in two consecutive batches
replicas      the same ranks in a growing number of replica groups: All2All inside groups against sync between them
memory        bytes per rank, compared with the formula S (M - 1) / T for the bytes that replication adds

    nestrec bench sparse --collisions 0,0.12,0.6 --replicas 1,2,4 --job.dim 64
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nestrec.base.config import config
from nestrec.distributed import Topology
from nestrec.distributed.topology import ParallelConfig
from nestrec.embedding.routing.replica_key_union import ReplicaSyncConfig
from nestrec.embedding.row_optimizer import RowLayout
from nestrec_bench.bench import Bench, OutputPart
from nestrec_bench.harness.links import can_limit
from nestrec_bench.harness.local_ranks import run_on_ranks
from nestrec_bench.schedules.schedules_bench import SchedulesBenchConfig, measure_schedules
from nestrec_bench.schedules.schedules_job import TABLE, JobConfig, make_engine

_JOB = JobConfig(num_rows=1_600_000, dim=64, samples=1024, tokens=32, hidden=192)
_LESS = ("exposed_comm", "exposed_rows")


@config
class SparseBenchConfig:
    experiments: tuple[str, ...] = ("memory", "collisions", "replicas")
    """Experiments to run."""
    collisions: tuple[float, ...] = (0.0, 0.06, 0.12, 0.3, 0.6)
    """Fractions of a batch's keys that the previous batch contains too."""
    replicas: tuple[int, ...] = (1, 2, 4)
    """Numbers of replica groups of `replica_ranks` ranks; the others are compared with the first number."""
    ranks: int = 2
    """Number of processes of the collisions experiment."""
    replica_ranks: int = 4
    """Number of processes of the replicas and memory experiments."""
    micro_batches: int = 4
    """Number of micro-batches per batch; collisions are also measured with 1."""
    comm_share: float = 0.7
    """Total communication of serial as a fraction of its computation, which determines the bandwidth."""
    link_mbit: float | None = None
    """Bandwidth of each rank's link in Mbit/s, each way. None: according to comm_share."""
    emulated: bool = False
    """Whether to emulate the links by waiting instead of limiting real ones."""
    rounds: int = 5
    """Number of rounds per schedule."""
    steps: int = 8
    """Number of steps per round."""
    job: JobConfig = _JOB
    """Options of the training job."""


def measure_sparse(bench: SparseBenchConfig) -> Iterator[dict[str, Any]]:
    """Yield the rows of all experiments as they are measured."""
    for name in bench.experiments:
        yield from {"memory": _memory, "collisions": _collisions, "replicas": _replicas}[name](bench)


def _collisions(bench: SparseBenchConfig) -> Iterator[dict[str, Any]]:
    link_mbit = bench.link_mbit
    for rate in bench.collisions:
        rows = measure_schedules(
            SchedulesBenchConfig(
                ranks=bench.ranks,
                link_mbit=link_mbit,
                comm_share=bench.comm_share,
                emulated=bench.emulated,
                micro_batches=tuple(sorted({1, bench.micro_batches})),
                window_cache=(False,),
                schedules=("serial", "nested", "priority", "semi_async"),
                rounds=bench.rounds,
                steps=bench.steps,
                job=replace(bench.job, collision=rate),
                calibrate_at=1,
            )
        )
        link_mbit = rows[0]["link_mbit"]
        for row in rows:
            less = {
                f"{name}_less_than_serial": round(1 - row[f"{name}_ms"] / rows[0][f"{name}_ms"], 4) for name in _LESS
            }
            yield {"experiment": "collisions", "collision": rate, **less, **row}


def _replicas(bench: SparseBenchConfig) -> Iterator[dict[str, Any]]:
    link_mbit = bench.link_mbit
    first: dict[str, float] = {}
    for replicas in bench.replicas:
        for mode in ("gradients", "weights") if replicas > 1 else ("gradients",):
            sync = ReplicaSyncConfig(mode=mode)
            rows = measure_schedules(
                SchedulesBenchConfig(
                    ranks=bench.replica_ranks,
                    replicas=replicas,
                    replica_sync=sync,
                    link_mbit=link_mbit,
                    comm_share=bench.comm_share,
                    emulated=bench.emulated,
                    micro_batches=(bench.micro_batches,),
                    window_cache=(False,),
                    schedules=("serial", "nested"),
                    rounds=bench.rounds,
                    steps=bench.steps,
                    job=bench.job,
                )
            )
            link_mbit = rows[0]["link_mbit"]
            first = first or {row["schedule"]: row["all_to_all_ms"] for row in rows[1:]}
            for row in rows[1:]:
                ratio = round(row["all_to_all_ms"] / first[row["schedule"]], 4)
                found = {"replica_sync": mode, "all_to_all_ratio": ratio, "all_rows_mb": _all_rows_mb(bench, replicas)}
                yield {"experiment": "replicas", **found, **row}


def _all_rows_mb(bench: SparseBenchConfig, replicas: int) -> float:
    """Return the megabytes that a rank sends if all rows of its shard are averaged, not only those used."""
    layout = _layout(bench.job)
    shard_bytes = (
        bench.job.num_rows * replicas / bench.replica_ranks * sum(c.width * c.dtype.itemsize for c in layout.columns)
    )
    return round(shard_bytes * 2 * (replicas - 1) / replicas * 1e-6, 3)


def _layout(job: JobConfig) -> RowLayout:
    return make_engine(replace(job, num_rows=1), Topology.single()).shards[TABLE].layout


def _memory(bench: SparseBenchConfig) -> Iterator[dict[str, Any]]:
    """Measure the memory of a table with all rows, in device memory."""
    job = replace(bench.job, store="device", num_rows=min(bench.job.num_rows, 400_000))
    table_bytes = job.num_rows * _layout(job).row_bytes
    first = 0.0
    for replicas in bench.replicas:
        by_rank = run_on_ranks(bench.replica_ranks, _store_bytes, job, replicas)
        mean = sum(by_rank) / len(by_rank)
        ranks = bench.replica_ranks
        first = first or mean
        formula = table_bytes * (replicas - 1) / ranks
        row = {"ranks": ranks, "replicas": replicas, "table_mb": table_bytes * 1e-6, "held_mb": mean * 1e-6}
        error = round((mean - first) / formula - 1, 5) if formula else None
        yield {"experiment": "memory", **row, "extra_mb": (mean - first) * 1e-6, "formula_mb": formula * 1e-6,
               "extra_over_formula_less_1": error}  # fmt: skip


def _store_bytes(topology: Topology, job: JobConfig, replicas: int) -> int:
    groups = Topology.of_process_group(topology.device, ParallelConfig(num_replicas=replicas))
    engine = make_engine(job, groups)
    shard = engine.shards[TABLE]
    shard.store.reserve(shard.key_index.num_slots)
    statistics = shard.store.statistics()
    return statistics["host_bytes"] + statistics["device_bytes"]


def short_rows(rows: list[dict[str, Any]], experiment: str) -> list[dict[str, Any]]:
    """Return the main columns of an experiment, for a terminal."""
    return [{name: row[name] for name in _SHOWN[experiment]} for row in rows if row["experiment"] == experiment]


_SHOWN = {
    "collisions": ("collision", "schedule", "micro_batches", "step_ms", "compute_ms", "raw_comm_ms", "exposed_comm_ms",
                   "exposed_rows_ms", "exposed_comm_less_than_serial", "exposed_rows_less_than_serial",
                   "max_abs_diff"),
    "replicas": ("replicas", "replica_sync", "schedule", "step_ms", "all_to_all_ms", "all_to_all_ratio", "sent_mb",
                 "replica_sync_ms", "replica_mb", "all_rows_mb", "max_abs_diff"),
    "memory": ("replicas", "held_mb", "extra_mb", "formula_mb", "extra_over_formula_less_1"),
}  # fmt: skip


def _show(rows: Sequence[Mapping[str, Any]], more: Mapping[str, Any]) -> list[OutputPart]:
    return [
        (experiment, short_rows([dict(row) for row in rows], experiment))
        for experiment in ("collisions", "replicas", "memory")
    ]


BENCH = Bench(
    config=SparseBenchConfig,
    measure=measure_sparse,
    show=_show,
    is_emulated=lambda bench: bench.emulated or not can_limit(),
)
