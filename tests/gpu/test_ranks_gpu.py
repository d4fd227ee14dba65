"""Ranks that share one GPU: every schedule, store and replica mode leaves the bits of serial, over every transport.

With NESTREC_MANY_GPUS_RESULTS naming a file, what was found is kept there, a row for each combination.
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
        pools[world] = RankPool(world, ParallelConfig(exchange="host"), device="cuda")
    return pools[world]


def watched(topology: Topology, schedule: str, job: Job) -> tuple[dict[str, Any], dict[str, float]]:
    """The state after a run, and how often a lane waited for the device in a step of the steady state: hidden, and by a
    transport over the host, which must."""
    training = Training(regrouped(topology, job.ranks), schedule, job)
    advance = training.pipeline.schedule.advance

    def advance_watched(step, feed):
        with warnings.catch_warnings():  # the mode says once that it is a prototype
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("warn" if step.number in STEADY else "default")
        return advance(step, feed)

    training.pipeline.schedule.advance = advance_watched
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = training.run()
    said = [w for w in found if "called a synchronizing" in str(w.message)]
    hidden = [w for w in said if not w.filename.endswith("cuda/streams.py")]  # where a transport asks to wait
    for place in sorted({f"{w.filename}:{w.lineno}" for w in hidden}):
        print(f"{schedule} waits at {place}", file=sys.stderr, flush=True)
    waits = {"syncs_per_step": len(hidden), "transport_waits_per_step": len(said) - len(hidden)}
    return result, {name: count / len(STEADY) for name, count in waits.items()}


def findings(topology: Topology, job: Job) -> list[dict[str, Any]]:
    """A row for each schedule: equal to serial, or to its definition, and how often it waited."""
    expected = train(topology, "serial", job)
    rows = [{"schedule": "serial", "equal_to_serial": True}]
    for schedule in [*EXACT, "semi_async"]:
        result, waits = watched(topology, schedule, job)
        row = {"schedule": schedule, "equal_to_serial": same(result, expected), **waits}
        if schedule == "semi_async":  # by its definition nothing is late where neighbours share nothing
            row["most_late"] = result["statistics"].most_late
            apart = replace(job, stream="no_overlap", num_steps=8, num_samples=Job.num_samples)
            defined = same(train(topology, schedule, apart), train(topology, "serial", apart))
            row["equal_to_definition"] = defined and row["most_late"] <= 1
        rows.append(row)
    return [{**row, "equal": row.get("equal_to_definition", row["equal_to_serial"])} for row in rows]


def record(rows: list[dict[str, Any]]) -> None:
    if not (name := os.environ.get("NESTREC_MANY_GPUS_RESULTS")):
        return
    path = Path(name)
    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    command = f"NESTREC_MANY_GPUS_RESULTS=FILE pytest {' '.join(sys.argv[1:])}"
    path.write_text(json.dumps(make_frame(bench="many_gpus", command=command, rows=[*kept, *rows]), indent=2) + "\n")


CASES = [
    (transport, world, store, replicas)
    for transport, worlds in WORLDS.items()
    for world, store, replicas in itertools.product(worlds, ["device", "dram"], [1, 2])
    if replicas <= world
]


@pytest.mark.parametrize(("transport", "world", "store", "replicas"), CASES, ids=str)
def test_every_schedule_leaves_the_bits_of_serial(gpu_pools, transport, world, store, replicas):
    ranks = ParallelConfig(exchange=transport, replicas=replicas)
    job = Job(store=store, device="cuda", num_steps=17, fences=(6,), ranks=ranks, window_cache=replicas == 1)
    if world == 1:
        found = [findings(nccl_alone(), replace(job, ranks=ParallelConfig()))]
    else:
        found = pool_of(gpu_pools, world).run(findings, job)
    device = torch.cuda.get_device_name()
    about = {"device": device, "ranks": world, "store": store, "transport": transport}
    about |= {"replicas": "gradients" if replicas > 1 else "none", "replica_groups": replicas}
    record([{**about, **row} for row in found[0]])
    for of_rank in found:
        for row in of_rank:
            assert row["equal"], row
            assert not row.get("syncs_per_step"), row


def delayed_updates(topology: Topology, job: Job) -> bool:
    """Whether `priority` equals `serial` if the deferred update of exclusive rows begins late on the device."""
    update = CollisionStages._update

    def late(stages: CollisionStages, pair: Any, which: Any, rates: Any) -> None:
        if which == "exclusive":
            torch.cuda._sleep(30_000_000)
        update(stages, pair, which, rates)

    expected = train(topology, "serial", job)
    CollisionStages._update = late
    try:
        return same(train(topology, "priority", job), expected)
    finally:
        CollisionStages._update = update


@pytest.mark.parametrize("transport", ["copy_engine", "host"])
@pytest.mark.parametrize(("world", "store"), [(4, "dram"), (2, "dram"), (4, "device")])
def test_priority_schedule_keeps_collisions_until_used(gpu_pools, transport, world, store):
    """Index tensors made on the communication stream are read by a late update on the lookup stream."""
    ranks = ParallelConfig(exchange=transport, replicas=2)
    job = Job(store=store, device="cuda", num_steps=17, fences=(6,), ranks=ranks)
    assert all(pool_of(gpu_pools, world).run(delayed_updates, job))


def on_two_hosts(topology: Topology, job: Job) -> list[dict[str, Any]]:
    """As if two of the ranks lived on each of two hosts."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    try:
        return findings(topology, job)
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = str(topology.world)


@pytest.mark.parametrize("is_by_hosts", [True, False], ids=["by_hosts", "four_holders_of_hosts"])
def test_exchanges_by_hosts_and_sums_by_slices_leave_the_bits_of_serial(gpu_pools, is_by_hosts):
    ranks = ParallelConfig(exchange="host", hierarchy=is_by_hosts, replicas=1 if is_by_hosts else 4)
    job = Job(device="cuda", num_steps=17, num_samples=48, fences=(6,), ranks=ranks, window_cache=is_by_hosts)
    found = pool_of(gpu_pools, 4).run(on_two_hosts if is_by_hosts else findings, job)
    about = {"device": torch.cuda.get_device_name(), "ranks": 4, "store": "device", "transport": "host"}
    about |= {"replicas": "none" if is_by_hosts else "gradients", "replica_groups": ranks.replicas}
    record([{**about, "hierarchy": is_by_hosts, **row} for row in found[0]])
    for row in itertools.chain(*found):
        assert row["equal"], row
        assert not row.get("syncs_per_step"), row


_alone: list[Topology] = []


def nccl_alone() -> Topology:
    """A world of one that takes the path of many: every exchange is a collective of NCCL."""
    import torch.distributed as dist

    if not _alone:
        device = torch.device("cuda", torch.cuda.current_device())
        limit = timedelta(seconds=60)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
        _alone.append(Topology.of_process_group(device, ParallelConfig(exchange="collectives"), groups_of_one=True))
    return _alone[0]


@pytest.mark.parametrize("world", [1, 2])
def test_dense_sums_inside_the_backward_pass_leave_the_bits_of_serial(gpu_pools, world):
    """One rank by NCCL, two by the host."""
    job = Job(device="cuda", num_steps=17, fences=(6,))
    if world == 1:
        found = [findings(replace(nccl_alone(), options=THREE_BUCKETS), job)]
    else:
        found = pool_of(gpu_pools, world).run(findings, replace(job, ranks=replace(THREE_BUCKETS, exchange="host")))
    for row in itertools.chain(*found):
        assert row["equal"], row
        assert not row.get("syncs_per_step"), row


def test_keys_of_the_host_cross_by_collectives_of_the_device():
    topology = nccl_alone()
    assert isinstance(topology.keys.transport, DeviceStagedTransport)
    assert topology.keys.watch is not None
    rows = torch.randint(0, 99, (7, 3))
    assert torch.equal(all_to_all_rows(topology.keys, rows, [7], [7]), rows)
    assert torch.equal(all_gather_equal(topology.keys, rows)[0], rows)
    total = rows.clone()
    all_reduce_sum(topology.keys, total)
    broadcast(topology.keys, total)
    assert torch.equal(total, rows)


def grown(topology: Topology, job: Job) -> dict[str, list[int]]:
    """Bytes in use on the device and on the host after a quarter of the steps and after all."""
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
def test_memory_does_not_grow(gpu_pools, transport, world):
    """Over some hundred steps, or as many as NESTREC_MEMORY_STEPS says."""
    ranks = ParallelConfig() if world == 1 else ParallelConfig(exchange=transport)
    steps = MEMORY_STEPS
    job = Job(stream="distance_two", num_steps=steps, num_micro_batches=2, device="cuda", ranks=ranks)
    found = [grown(nccl_alone(), job)] if world == 1 else pool_of(gpu_pools, world).run(grown, job)
    about = {"device": torch.cuda.get_device_name(), "ranks": world, "store": "device", "transport": transport}
    record([{**about, "schedule": "nested", "replicas": "none", "steps": [steps // 4, steps], **found[0]}])
    for used in found:
        before, after = used["device_bytes"]
        assert after <= before * 1.05 + (1 << 20), used
        before, after = used["host_bytes"]
        assert after <= before + (64 << 20), used


def test_a_collective_that_hangs_ends_the_process_with_its_code_and_cause():
    """A kernel that runs for ever stands for a peer that does not answer.

    The last test of this file, and not a client of MPS: what it leaves on the device may not reach others.
    """
    code = """
import torch, torch.distributed as dist, time
from datetime import timedelta
from nestrec.distributed import Topology
from nestrec.distributed.collectives import all_reduce_sum
from nestrec.distributed.topology import ParallelConfig as ParallelConfig
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60))
device = torch.device("cuda", 0)
topology = Topology.of_process_group(device, ParallelConfig(exchange="collectives"), groups_of_one=True, timeout_s=2.0)
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
    assert "a peer was lost in dense.all_reduce: no answer in 2 s" in done.stderr
    assert time.monotonic() - start < 40
