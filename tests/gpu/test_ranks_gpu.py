"""Ranks that share one GPU: schedules are bitwise identical to serial for every store, replica mode and transport.

If NESTREC_MANY_GPUS_RESULTS names a file, results are added to it, one row per combination.
"""

import itertools
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from dense_jobs import THREE_BUCKETS
from schedule_jobs import Job, Training, batches_of, regrouped, same, train

from nestrec.base.errors import PEER_LOST
from nestrec.distributed import Topology
from nestrec.distributed.collectives import all_gather_equal, all_reduce_sum, all_to_all_rows, broadcast
from nestrec.distributed.topology import ParallelConfig
from nestrec.distributed.transports import DeviceStagedTransport
from nestrec.pipeline import LearningRates, LookaheadIterator, TrainingStep
from nestrec.pipeline.collision_stages import CollisionStages
from nestrec.report.result_file import make_frame
from support.rank_pool import RankPool

pytestmark = pytest.mark.gpu

EXACT = ["dual_buffer", "frozen_window", "nested", "priority"]
STEADY = range(10, 15)
MEMORY_STEPS = int(os.environ.get("NESTREC_MEMORY_STEPS", "400"))
WORLDS = {"collectives": [1], "host": [2, 4], "copy_engine": [2, 4]}


@pytest.fixture(scope="module")
def gpu_pools() -> Iterator[dict[int, RankPool]]:
    pools: dict[int, RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.close()


def pool_of(pools: dict[int, RankPool], world: int) -> RankPool:
    if world not in pools:
        pools[world] = RankPool(world, ParallelConfig(transport="host"), device="cuda")
    return pools[world]


def train_counting_syncs(topology: Topology, schedule: str, job: Job) -> tuple[dict[str, Any], dict[str, float]]:
    """Return the state after a run and the number of synchronizations per step in the steady state.

    Synchronizations of a transport over the host are necessary and counted separately.
    """
    training = Training(regrouped(topology, job.ranks), schedule, job)
    advance = training.pipeline.schedule.advance

    def advance_with_warnings(step, feed):
        with warnings.catch_warnings():  # the first call warns that the mode is a prototype
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("warn" if step.number in STEADY else "default")
        return advance(step, feed)

    training.pipeline.schedule.advance = advance_with_warnings
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = training.run()
    syncs = [w for w in found if "called a synchronizing" in str(w.message)]
    hidden = [w for w in syncs if not w.filename.endswith("cuda/streams.py")]  # an explicit wait of a transport
    for location in sorted({f"{w.filename}:{w.lineno}" for w in hidden}):
        print(f"{schedule} waits at {location}", file=sys.stderr, flush=True)
    waits = {"syncs_per_step": len(hidden), "transport_waits_per_step": len(syncs) - len(hidden)}
    return result, {name: count / len(STEADY) for name, count in waits.items()}


def findings(topology: Topology, job: Job) -> list[dict[str, Any]]:
    """Return one row per schedule: equality to serial or to its definition, and synchronizations per step."""
    expected = train(topology, "serial", job)
    rows = [{"schedule": "serial", "equal_to_serial": True}]
    for schedule in [*EXACT, "semi_async"]:
        result, waits = train_counting_syncs(topology, schedule, job)
        row = {"schedule": schedule, "equal_to_serial": same(result, expected), **waits}
        if schedule == "semi_async":  # equal to serial if adjacent batches have no common keys
            row["most_late"] = result["statistics"].most_late
            disjoint = replace(job, stream="no_overlap", num_steps=8, num_samples=Job.num_samples)
            is_equal = same(train(topology, schedule, disjoint), train(topology, "serial", disjoint))
            row["equal_to_definition"] = is_equal and row["most_late"] <= 1
        rows.append(row)
    return [{**row, "equal": row.get("equal_to_definition", row["equal_to_serial"])} for row in rows]


def record(rows: list[dict[str, Any]]) -> None:
    if not (name := os.environ.get("NESTREC_MANY_GPUS_RESULTS")):
        return
    path = Path(name)
    earlier = json.loads(path.read_text())["rows"] if path.exists() else []
    command = f"NESTREC_MANY_GPUS_RESULTS=FILE pytest {' '.join(sys.argv[1:])}"
    path.write_text(json.dumps(make_frame(bench="many_gpus", command=command, rows=[*earlier, *rows]), indent=2) + "\n")


CASES = [
    (transport, world, store, replicas)
    for transport, worlds in WORLDS.items()
    for world, store, replicas in itertools.product(worlds, ["device", "dram"], [1, 2])
    if replicas <= world
]


@pytest.mark.parametrize(("transport", "world", "store", "replicas"), CASES, ids=str)
def test_schedules_on_gpu_ranks_are_bitwise_identical(gpu_pools, transport, world, store, replicas):
    ranks = ParallelConfig(transport=transport, num_replicas=replicas)
    job = Job(store=store, device="cuda", num_steps=17, fences=(6,), ranks=ranks, window_cache=replicas == 1)
    if world == 1:
        found = [findings(single_nccl_rank(), replace(job, ranks=ParallelConfig()))]
    else:
        found = pool_of(gpu_pools, world).run(findings, job)
    device = torch.cuda.get_device_name()
    about = {"device": device, "ranks": world, "store": store, "transport": transport}
    about |= {"replicas": "gradients" if replicas > 1 else "none", "replica_groups": replicas}
    record([{**about, **row} for row in found[0]])
    for row in itertools.chain(*found):
        assert row["equal"], row
        assert not row.get("syncs_per_step"), row


def delayed_updates(topology: Topology, job: Job) -> bool:
    """Return whether `priority` equals `serial` if the deferred update of exclusive rows begins late on the device."""
    update = CollisionStages._update

    def delayed_update(stages: CollisionStages, pair: Any, which: Any, rates: Any) -> None:
        if which == "exclusive":
            torch.cuda._sleep(30_000_000)
        update(stages, pair, which, rates)

    expected = train(topology, "serial", job)
    CollisionStages._update = delayed_update
    try:
        return same(train(topology, "priority", job), expected)
    finally:
        CollisionStages._update = update


@pytest.mark.parametrize("transport", ["copy_engine", "host"])
@pytest.mark.parametrize(("world", "store"), [(4, "dram"), (2, "dram"), (4, "device")])
def test_priority_schedule_keeps_collisions_until_used(gpu_pools, transport, world, store):
    """A late update on the lookup stream reads index tensors that were created on the communication stream."""
    ranks = ParallelConfig(transport=transport, num_replicas=2)
    job = Job(store=store, device="cuda", num_steps=17, fences=(6,), ranks=ranks)
    assert all(pool_of(gpu_pools, world).run(delayed_updates, job))


def on_two_hosts(topology: Topology, job: Job) -> list[dict[str, Any]]:
    """Run `findings` with an environment of two hosts with two ranks each."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    try:
        return findings(topology, job)
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = str(topology.world)


@pytest.mark.parametrize("is_hierarchical", [True, False], ids=["hierarchical", "four_replicas"])
def test_hierarchical_all_to_all_and_replicas_equal_serial(gpu_pools, is_hierarchical):
    num_replicas = 1 if is_hierarchical else 4
    ranks = ParallelConfig(transport="host", hierarchical_all_to_all=is_hierarchical, num_replicas=num_replicas)
    job = Job(device="cuda", num_steps=17, num_samples=48, fences=(6,), ranks=ranks, window_cache=is_hierarchical)
    found = pool_of(gpu_pools, 4).run(on_two_hosts if is_hierarchical else findings, job)
    about = {"device": torch.cuda.get_device_name(), "ranks": 4, "store": "device", "transport": "host"}
    about |= {"replicas": "none" if is_hierarchical else "gradients", "replica_groups": ranks.num_replicas}
    record([{**about, "hierarchy": is_hierarchical, **row} for row in found[0]])
    for row in itertools.chain(*found):
        assert row["equal"], row
        assert not row.get("syncs_per_step"), row


_single_rank: list[Topology] = []


def single_nccl_rank() -> Topology:
    """Return a topology of one rank that uses the code of many ranks: every exchange is an NCCL collective."""
    import torch.distributed as dist

    if not _single_rank:
        device = torch.device("cuda", torch.cuda.current_device())
        limit = timedelta(seconds=60)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
        _single_rank.append(
            Topology.of_process_group(device, ParallelConfig(transport="collectives"), groups_of_one=True)
        )
    return _single_rank[0]


@pytest.mark.parametrize("world", [1, 2])
def test_overlapped_all_reduce_is_bitwise_identical(gpu_pools, world):
    """One rank uses NCCL, two ranks the host transport."""
    job = Job(device="cuda", num_steps=17, fences=(6,))
    if world == 1:
        found = [findings(replace(single_nccl_rank(), options=THREE_BUCKETS), job)]
    else:
        found = pool_of(gpu_pools, world).run(findings, replace(job, ranks=replace(THREE_BUCKETS, transport="host")))
    for row in itertools.chain(*found):
        assert row["equal"], row
        assert not row.get("syncs_per_step"), row


def test_host_keys_are_exchanged_by_device_collectives():
    topology = single_nccl_rank()
    assert isinstance(topology.keys.transport, DeviceStagedTransport)
    assert topology.keys.watchdog is not None
    rows = torch.randint(0, 99, (7, 3))
    assert torch.equal(all_to_all_rows(topology.keys, rows, [7], [7]), rows)
    assert torch.equal(all_gather_equal(topology.keys, rows)[0], rows)
    total = rows.clone()
    all_reduce_sum(topology.keys, total)
    broadcast(topology.keys, total)
    assert torch.equal(total, rows)


def memory_use(topology: Topology, job: Job) -> dict[str, list[int]]:
    """Return the bytes in use on the device and on the host after a quarter of the steps and after all steps."""
    training = Training(regrouped(topology, job.ranks), "nested", job)
    feed = LookaheadIterator(batches_of(job, training.topology, 1))
    used = {"device_bytes": [], "host_bytes": []}
    for number in range(1, job.num_steps + 1):
        is_fence = number in (job.num_steps // 4, job.num_steps)
        step = TrainingStep(
            number=number, batch=next(feed), rates=LearningRates(dense=0.01, tables=0.1), is_fence=is_fence
        )
        training.pipeline.schedule.advance(step, feed)
        if is_fence:
            training.pipeline.tracer.take()
            torch.cuda.synchronize()
            used["device_bytes"].append(torch.cuda.memory_allocated())
            used["host_bytes"].append(psutil.Process().memory_info().rss)
    training.pipeline.close()
    return used


@pytest.mark.parametrize(("transport", "world"), [("collectives", 1), ("host", 2)])
def test_training_memory_does_not_grow(gpu_pools, transport, world):
    """NESTREC_MEMORY_STEPS sets the number of steps."""
    ranks = ParallelConfig() if world == 1 else ParallelConfig(transport=transport)
    steps = MEMORY_STEPS
    job = Job(stream="distance_two", num_steps=steps, num_micro_batches=2, device="cuda", ranks=ranks)
    found = [memory_use(single_nccl_rank(), job)] if world == 1 else pool_of(gpu_pools, world).run(memory_use, job)
    about = {"device": torch.cuda.get_device_name(), "ranks": world, "store": "device", "transport": transport}
    record([{**about, "schedule": "nested", "replicas": "none", "steps": [steps // 4, steps], **found[0]}])
    for used in found:
        before, after = used["device_bytes"]
        assert after <= before * 1.05 + (1 << 20), used
        before, after = used["host_bytes"]
        assert after <= before + (64 << 20), used


def test_watchdog_ends_process_of_hanging_collective():
    """A kernel that does not end simulates a peer that does not respond.

    This is the last test of the file, and its process does not use MPS, so that the running kernel affects no other
    test.
    """
    code = """
import torch, torch.distributed as dist, time
from datetime import timedelta
from nestrec.distributed import Topology
from nestrec.distributed.collectives import all_reduce_sum
from nestrec.distributed.topology import ParallelConfig
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60))
device = torch.device("cuda", 0)
topology = Topology.of_process_group(device, ParallelConfig(transport="collectives"), groups_of_one=True, timeout_s=2.0)
value = torch.ones(3, device=device)
all_reduce_sum(topology.dense, value)
torch.cuda.synchronize()
torch.cuda._sleep(1 << 36)
all_reduce_sum(topology.dense, value)
time.sleep(30)
"""
    start = time.monotonic()
    alone = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, env=alone)
    assert done.returncode == PEER_LOST, done.stderr[-2000:]
    assert "peer was lost in dense.all_reduce: no response within 2 s" in done.stderr
    assert time.monotonic() - start < 40
