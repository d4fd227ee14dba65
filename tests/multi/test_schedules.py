"""Every exact schedule is bitwise identical to `serial` in tables, row state, dense weights and loss."""

import itertools
from typing import Any

import pytest
import table_jobs
from schedule_jobs import Job, compare, same, train

from nestrec.distributed import Topology

WINDOWED = ["dual_buffer", "frozen_window", "nested"]
EXACT = [*WINDOWED, "priority"]
MAIN_SCHEDULES = ["nested", "priority"]
PARTS_OF_NESTED = ["dual_buffer", "frozen_window"]
"""`nested` combines these two; tests with many settings run them alone only if they are slow tests."""
STREAMS = ["zipf", "distance_one", "distance_two", "all_equal", "no_overlap"]
FACTORS: dict[str, list[Any]] = {
    "stream": STREAMS,
    "optimizer": ["sgd", "rowwise_adagrad", "adam"],
    "store": ["device", "dram", "disk"],
    "world": [1, 2, 4],
    "window_cache": [False, True],
}
STEPS = 10
"""Enough for a fence in the middle and a full pipeline before and after it, so that a broken rule changes results."""


def pairwise_cover(factors: dict[str, list[Any]]) -> list[tuple[Any, ...]]:
    """Return few combinations that contain every pair of values of any two factors (greedy pairwise testing)."""

    def pairs(values: tuple[Any, ...]) -> set[Any]:
        return set(itertools.combinations(enumerate(values), 2))

    candidates = {values: pairs(values) for values in itertools.product(*factors.values())}
    missing = set().union(*candidates.values())
    selected = []
    while missing:
        best = max(candidates, key=lambda values: len(candidates[values] & missing))
        selected.append(best)
        missing -= candidates[best]
    return selected


def equality_with_serial(pools, world: int, job: Job, schedules: list[str] = EXACT) -> list[dict[str, bool]]:
    if world == 1:
        return [compare(Topology.single(), schedules, job)]
    return pools[world].run(compare, schedules, job)


def check_equality(pools, tmp_path, values: tuple[Any, ...], num_steps: int, schedules: list[str] = EXACT) -> None:
    """Compare schedules with `serial`, with a fence in the middle of the run."""
    stream, optimizer, store, world, window_cache = values
    job = Job(
        stream=stream,
        optimizer=optimizer,
        store=store,
        window_cache=window_cache,
        folder=str(tmp_path),
        num_steps=num_steps,
        fences=(5 * num_steps // 12,),
    )
    assert equality_with_serial(pools, world, job, schedules) == [dict.fromkeys(schedules, True)] * world


@pytest.mark.parametrize("values", pairwise_cover({**FACTORS, "schedule": EXACT}), ids=str)
def test_exact_schedules_equal_serial_bitwise(pools, tmp_path, values):
    *setting, schedule = values
    check_equality(pools, tmp_path, tuple(setting), STEPS, [schedule])


@pytest.mark.slow
@pytest.mark.parametrize("values", list(itertools.product(*FACTORS.values())), ids=str)
def test_schedules_equal_serial_full_grid(pools, tmp_path, values):
    check_equality(pools, tmp_path, values, num_steps=60)


TABLE_FACTORS: dict[str, list[Any]] = {
    "world": [1, 2, 4],
    "types": ["mixed", "float32"],
    "eviction_policy": ["lru", "ttl", "none"],
    "micro_batches": [1, 3],
    "window_cache": [False, True],
}
ALL_TABLE_FACTORS = TABLE_FACTORS | {"eviction_policy": ["lru", "ttl", "lfu", "none"]}


def check_tables(pools, tmp_path, values: tuple[Any, ...], num_steps: int, schedules: list[str] = EXACT) -> None:
    world = values[0]
    named = dict(zip(list(TABLE_FACTORS)[1:], values[1:], strict=True))
    job = table_jobs.TablesJob(folder=str(tmp_path), num_steps=num_steps, **named)
    ranks = [table_jobs.compare(Topology.single(), schedules, job)] if world == 1 else None
    assert (ranks or pools[world].run(table_jobs.compare, schedules, job)) == [dict.fromkeys(schedules, True)] * world


@pytest.mark.parametrize("values", pairwise_cover({**TABLE_FACTORS, "schedule": EXACT}), ids=str)
def test_schedules_equal_serial_with_mixed_tables(pools, tmp_path, values):
    *setting, schedule = values
    check_tables(pools, tmp_path, tuple(setting), 4, [schedule])


def test_schedule_stale_differs_with_mixed_tables(tmp_path):
    """If `stale` were equal too, the tests of the exact schedules could not fail."""
    job = table_jobs.TablesJob(folder=str(tmp_path), num_steps=4)
    assert table_jobs.compare(Topology.single(), ["stale"], job) == {"stale": False}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("world", "micro_batches", "window_cache"),
    [
        pytest.param(*case, marks=[] if case == (2, 3, True) else pytest.mark.slow)
        for case in itertools.product((1, 2, 3, 4), (1, 3), (False, True))
    ],
)
def test_schedules_replicated_tables_equal_sharded(pools, tmp_path, world, micro_batches, window_cache):
    job = table_jobs.TablesJob(
        folder=str(tmp_path), num_steps=4, micro_batches=micro_batches, window_cache=window_cache
    )
    schedules = ["serial", *EXACT, "semi_async", "stale"]
    ranks = [table_jobs.compare_replicated(Topology.single(), schedules, job)] if world == 1 else None
    ranks = ranks or pools[world].run(table_jobs.compare_replicated, schedules, job)
    assert ranks == [dict.fromkeys(schedules, True)] * world


@pytest.mark.slow
@pytest.mark.parametrize("values", list(itertools.product(*ALL_TABLE_FACTORS.values())), ids=str)
def test_schedules_equal_serial_with_mixed_tables_full_grid(pools, tmp_path, values):
    check_tables(pools, tmp_path, values, num_steps=40)


@pytest.mark.parametrize(
    ("rule", "stream", "harmless_stream", "schedules"),
    [
        ("shared-row copy", "distance_one", "distance_two", ["dual_buffer", "nested"]),
        ("shared-row copy of state", "distance_one", "distance_two", ["dual_buffer", "nested"]),
        ("write-back before gather", "distance_two", "distance_one", ["dual_buffer", "nested"]),
        ("ordered write-back", "distance_one", "distance_two", ["dual_buffer", "nested"]),
        ("one update per step", "zipf", None, WINDOWED),
        ("order of sums", "zipf", None, WINDOWED),
        ("deferred gradients", "distance_two", "distance_one", ["priority"]),
    ],
)
def test_schedule_rule_violations_change_results(rule, stream, harmless_stream, schedules):
    results = compare(Topology.single(), schedules, Job(stream=stream, broken=rule, num_steps=STEPS))
    assert results == dict.fromkeys(schedules, False)
    if harmless_stream is not None:
        equal = compare(Topology.single(), schedules, Job(stream=harmless_stream, broken=rule, num_steps=STEPS))
        assert equal == dict.fromkeys(schedules, True)


@pytest.mark.parametrize(
    ("rule", "world", "window_cache", "schedules"),
    # With the window cache, a rank sends each gradient once, and the order of a sum of two numbers does not matter.
    # So the order of sums needs four ranks.
    [
        ("one update per step", 2, False, WINDOWED),
        ("one update per step", 2, True, ["nested"]),
        ("order of sums", 2, False, WINDOWED),
        ("order of sums", 4, True, ["nested"]),
        pytest.param("one update per step", 2, True, PARTS_OF_NESTED, marks=pytest.mark.slow),
        pytest.param("order of sums", 4, True, PARTS_OF_NESTED, marks=pytest.mark.slow),
    ],
)
def test_schedule_wrong_order_of_sums_changes_results(pools, rule, world, window_cache, schedules):
    job = Job(broken=rule, window_cache=window_cache, num_steps=STEPS)
    for results in equality_with_serial(pools, world, job, schedules):
        assert results == dict.fromkeys(schedules, False)


@pytest.mark.parametrize("stale_steps", [1, 2, 4])
def test_schedule_stale_misses_only_updates_of_its_delay(stale_steps):
    stale = {}
    for stream in ("no_overlap", "distance_two", "distance_one"):
        job = Job(stream=stream, stale_steps=stale_steps, num_steps=STEPS)
        stale |= {stream: compare(Topology.single(), ["stale"], job)["stale"]}
    assert stale == {"no_overlap": True, "distance_two": stale_steps == 1, "distance_one": False}


def test_schedule_stale_is_deterministic(pools):
    job = Job(stale_steps=2, num_steps=STEPS)
    first, second = (pools[2].run(train, "stale", job) for _ in range(2))
    assert all(same(a, b) for a, b in zip(first, second, strict=True))
    assert first[0]["tables"] == first[1]["tables"]


@pytest.mark.parametrize("world", [1, 2])
def test_schedule_semi_async_staleness_is_one_step(pools, world):
    results = {}
    for stream in ("no_overlap", "distance_two", "distance_one"):
        job = Job(stream=stream, num_steps=14, fences=(7,))
        run = [train(Topology.single(), "semi_async", job)] if world == 1 else pools[2].run(train, "semi_async", job)
        serial = [train(Topology.single(), "serial", job)] if world == 1 else pools[2].run(train, "serial", job)
        late = {result["statistics"].rows_late > 0 for result in run}
        results[stream] = (all(same(a, b) for a, b in zip(run, serial, strict=True)), late)
        assert {result["statistics"].most_late for result in run} == {1}
    assert results == {"no_overlap": (True, {False}), "distance_two": (True, {False}), "distance_one": (False, {True})}


def test_schedule_semi_async_rejects_staleness_of_two():
    with pytest.raises(AssertionError, match="miss 2 updates"):
        train(Topology.single(), "semi_async", Job(broken="one step late", num_steps=6))


def test_schedule_semi_async_has_six_batches_in_flight():
    spans = train(Topology.single(), "semi_async", Job(num_steps=12))["spans"]
    loads = {span.step: span for span in spans if span.name == "train.embedding.deduplicate"}
    steps = {span.step: span for span in spans if span.kind == "step"}
    assert all(steps[t].start_ns < loads[t + 5].start_ns < steps[t + 1].start_ns for t in range(2, 7))


@pytest.mark.parametrize("schedule", ["stale", "semi_async", "priority"])
def test_schedules_resumed_run_is_exact(schedule):
    uninterrupted = train(Topology.single(), schedule, Job(num_steps=14, fences=(7,), stale_steps=2))
    resumed = train(Topology.single(), schedule, Job(num_steps=14, restart_after=7, stale_steps=2))
    assert all(uninterrupted[name] == resumed[name] for name in ("tables", "dense", "losses"))


EDGE_CASES = {
    "short batches": Job(short_steps={3: 7, 4: 1, 7: 2, STEPS: 5}, num_steps=STEPS),
    "consecutive fences and one at the end": Job(fences=(1, 2, 3, 7, 8, 11), num_steps=12),
    "more micro-batches than samples": Job(num_micro_batches=8, num_samples=12, short_steps={6: 3}, num_steps=STEPS),
    "one micro-batch": Job(num_micro_batches=1, num_steps=STEPS),
    "two micro-batches": Job(num_micro_batches=2, num_steps=STEPS, window_cache=True),
    "one step": Job(num_steps=1),
    "restart in the middle of a full pipeline": Job(restart_after=8, fences=(3,), num_steps=14),
    "restart with window cache and disk store": Job(restart_after=5, num_steps=STEPS, window_cache=True, store="disk"),
    "admission after three uses": Job(admission={"admission_threshold": 3}, fences=(6, 11), num_steps=15),
    "least recently used": Job(admission={"eviction_policy": "lru", "max_rows": 24}, fences=(6, 10), num_steps=14),
    "least frequently used, restart": Job(
        admission={"eviction_policy": "lfu", "max_rows": 8, "admission_threshold": 2}, restart_after=8, num_steps=15
    ),
    "time to live": Job(stream="distance_two", admission={"eviction_policy": "ttl", "ttl_steps": 1}, num_steps=STEPS),
}


@pytest.mark.parametrize("name", EDGE_CASES)
@pytest.mark.parametrize(
    ("world", "schedules"),
    [
        (2, MAIN_SCHEDULES),
        pytest.param(2, PARTS_OF_NESTED, marks=pytest.mark.slow),
        pytest.param(1, EXACT, marks=pytest.mark.slow),
    ],
)
def test_schedules_edge_cases_equal_serial(pools, tmp_path, name, world, schedules):
    job = EDGE_CASES[name]
    job = Job(**{**{f: getattr(job, f) for f in job.__dataclass_fields__}, "folder": str(tmp_path)})
    assert equality_with_serial(pools, world, job, schedules) == [dict.fromkeys(schedules, True)] * world


SHARES = [((12, 0), False), ((0, 12), True), ((1, 11), False)]
"""Samples of the two ranks, and whether the window cache is enabled."""
MORE_SHARES = [*SHARES, ((12, 0), True), ((0, 12), False), ((1, 11), True)]


@pytest.mark.parametrize(
    ("shares", "window_cache", "schedules"),
    [
        *((*case, MAIN_SCHEDULES) for case in SHARES),
        *(pytest.param(*case, EXACT, marks=pytest.mark.slow) for case in MORE_SHARES),
    ],
)
def test_schedules_unequal_and_empty_ranks_equal_serial(pools, shares, window_cache, schedules):
    job = Job(shares=shares, window_cache=window_cache, num_steps=STEPS, short_steps={STEPS: 1})
    assert equality_with_serial(pools, 2, job, schedules) == [dict.fromkeys(schedules, True)] * 2


def test_schedule_nested_resumed_run_equals_serial():
    uninterrupted = train(Topology.single(), "serial", Job(num_steps=14))
    resumed = train(Topology.single(), "nested", Job(num_steps=14, restart_after=7))
    assert all(uninterrupted[name] == resumed[name] for name in ("tables", "dense", "losses"))


@pytest.mark.parametrize("schedule", ["serial", "stale", "semi_async", *EXACT])
def test_schedules_issue_collectives_in_one_order(pools, schedule):
    job = Job(num_steps=7, fences=(3,), window_cache=True, shares=(9, 0, 1, 2))
    first, second = (pools[4].run(train, schedule, job) for _ in range(2))
    issued = [result["issued"] for result in first + second]
    assert len(issued[0]) > 7 * 3 * 2, "vectors and gradients of every micro-batch, in addition to keys and sums"
    assert all(other == issued[0] for other in issued)


def test_schedule_nested_exchange_order_matches_paper():
    spans = train(Topology.single(), "nested", Job(num_steps=6, num_micro_batches=4))["spans"]
    lane = sorted((s for s in spans if s.lane == "communication" and s.kind != "wait"), key=lambda s: s.start_ns)
    names = {
        "train.embedding.exchange_vectors": "E",
        "train.embedding.exchange_gradients": "G",
        "train.dense.all_reduce": "D",
        "train.embedding.exchange_keys": "K",
    }
    order = [
        (f"{names[s.name]}{'' if s.micro_batch is None else s.micro_batch + 1}", s.step)
        for s in lane[:-3]
        if s.name in names
    ]
    start = order.index(("E2", 3))
    expected = [("E2", 3), ("K", 5), ("G1", 3), ("E3", 3), ("G2", 3), ("E4", 3), ("G3", 3), ("G4", 3), ("D", 3)]
    assert order[start - 1 : start + 10] == [("E1", 3), *expected, ("E1", 4)]


def test_schedule_priority_sends_shared_gradients_first():
    spans = train(Topology.single(), "priority", Job(num_steps=7, num_micro_batches=1))["spans"]
    lane = sorted((s for s in spans if s.lane == "communication" and s.kind != "wait"), key=lambda s: s.start_ns)
    names = {
        "train.embedding.exchange_vectors": "E",
        "train.embedding.exchange_gradients": "G",
        "train.dense.all_reduce": "D",
        "train.embedding.exchange_keys": "K",
        "train.embedding.collisions": "C",
    }
    order = [(names[s.name], s.step) for s in lane if s.name in names]
    shared_vectors = order.index(("D", 2)) + 1
    expected = [("E", 3), ("G", 2), ("K", 5), ("C", 3), ("E", 4), ("G", 3), ("D", 3), ("E", 4)]
    assert order[shared_vectors : shared_vectors + 8] == expected


@pytest.mark.parametrize("schedule", ["serial", "nested"])
def test_window_cache_sends_unique_keys_once(pools, schedule):
    job = Job(num_micro_batches=4, num_steps=10, window_cache=True)
    full_batch = Job(num_micro_batches=1, num_steps=10)
    cached, once, uncached = (
        [r["statistics"] for r in pools[2].run(train, schedule, j)]
        for j in (job, full_batch, Job(num_micro_batches=4, num_steps=10))
    )
    for leg in ("keys", "vectors", "gradients"):
        assert [getattr(s, leg).rows for s in cached] == [getattr(s, leg).rows for s in once]
        if leg != "keys":  # with the window cache, the messages of keys also contain the last use of each key
            assert [getattr(s, leg) for s in cached] == [getattr(s, leg) for s in once]
        assert sum(getattr(s, leg).rows for s in uncached) > sum(getattr(s, leg).rows for s in cached)
    assert all(s.window_bytes > 0 for s in cached)


def test_schedule_nested_skips_write_back_of_shared_rows():
    job = Job(stream="all_equal", num_steps=STEPS, fences=(5,))
    nested, serial = (train(Topology.single(), name, job)["statistics"] for name in ("nested", "serial"))
    rows_per_step = serial.rows_written // STEPS
    assert serial.rows_written == STEPS * rows_per_step
    assert nested.rows_written == 2 * rows_per_step
