"""Balanced training equals unbalanced training except for rounding: the rank of a sample does not matter."""

import json
from typing import Any

import pytest
from balance_jobs import TRUTH, relative, train, train_with_times

from nestrec.balance import POLICIES
from nestrec.pipeline import SCHEDULES
from nestrec.report import write_report
from nestrec.trace import load_spans
from support.tiny_runs import make_datasets

NUM_STEPS, NUM_GRID_STEPS = 10, 100
UNEQUAL, WITH_EMPTY_RANK = 7, 3
"""Batch sizes: not a multiple of the number of ranks; fewer samples than four ranks."""
NOT_EXACT = {"stale", "semi_async"}
EXACT_SCHEDULES = [name for name in SCHEDULES if name not in NOT_EXACT]
QUADRATIC = {"balance.cost.token_squared": 0.1}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("balanced")
    make_datasets(folder)
    return str(folder)


@pytest.fixture(scope="module")
def unbalanced(pools, data, tmp_path_factory):
    """Return a function that trains a reference run: unbalanced and serial, once per setting."""
    runs: dict[tuple[int, int, int], list[dict[str, Any]]] = {}

    def run(world: int, batch_size: int, num_steps: int = NUM_STEPS) -> dict[str, Any]:
        setting = world, batch_size, num_steps
        if setting not in runs:
            runs[setting] = pools[world].run(
                train, data, str(tmp_path_factory.mktemp("run")), num_steps, {"batch.batch_size": batch_size}
            )
        return runs[setting][0]

    return run


def compare(  # noqa: PLR0917
    pool, data, folder, expected, more: dict[str, Any], num_steps: int = NUM_STEPS
) -> list[dict[str, Any]]:
    results = pool.run(train, data, str(folder), num_steps, {**QUADRATIC, **more})
    for result in results:
        assert result["consumed"] == expected["consumed"]
        assert result["loss"] == pytest.approx(expected["loss"], rel=1e-9)
        for name, weights in expected["weights"].items():
            assert relative(result["weights"][name], weights) < 1e-9, name
    return results


@pytest.mark.parametrize("mode", ["read", "exchange"])
def test_balance_with_empty_rank_equals_unbalanced(pools, data, unbalanced, tmp_path, mode):
    setting = {"batch.batch_size": WITH_EMPTY_RANK, "balance.policy": "refined", "balance.mode": mode}
    results = compare(pools[4], data, tmp_path, unbalanced(4, WITH_EMPTY_RANK), setting)
    assert all(min(len(rank["samples"][step]) for rank in results) == 0 for step in range(NUM_STEPS))


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "fixed"])
def test_balance_policies_equal_unbalanced_on_two_ranks(pools, data, unbalanced, tmp_path, policy):
    setting = {"batch.batch_size": UNEQUAL, "balance.policy": policy, "batch.num_micro_batches": 3}
    results = compare(pools[2], data, tmp_path, unbalanced(2, UNEQUAL), setting)
    counts = {(len(a), len(b)) for a, b in zip(results[0]["samples"], results[1]["samples"], strict=True)}
    assert counts != {(4, 3)} or policy in ("zigzag", "karmarkar_karp")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("schedule", EXACT_SCHEDULES)
@pytest.mark.parametrize("mode", ["read", "exchange"])
@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("world", [2, 4])
def test_balance_policies_modes_schedules_equal_unbalanced(  # noqa: PLR0917
    pools, data, unbalanced, tmp_path, world, policy, mode, schedule
):
    setting = {"balance.policy": policy, "balance.mode": mode, "pipeline.schedule": schedule}
    for batch_size in (UNEQUAL, WITH_EMPTY_RANK):
        expected = unbalanced(world, batch_size, NUM_GRID_STEPS)
        more = {"batch.batch_size": batch_size, **setting}
        compare(pools[world], data, tmp_path / str(batch_size), expected, more, NUM_GRID_STEPS)


@pytest.mark.parametrize("schedule", [name for name in EXACT_SCHEDULES if name != "serial"])
def test_balance_with_exact_schedule_equals_serial(pools, data, unbalanced, tmp_path, schedule):
    setting = {
        "batch.batch_size": UNEQUAL,
        "balance.policy": "power",
        "balance.mode": "exchange",
        "pipeline.schedule": schedule,
    }
    compare(pools[2], data, tmp_path, unbalanced(2, UNEQUAL), setting)


@pytest.mark.slow
def test_balance_modes_assign_same_samples_in_one_order(pools, data, tmp_path):
    setting = {"batch.batch_size": 13, "balance.policy": "power", "batch.num_workers": 3}
    read, exchanged = (
        pools[4].run(train, data, str(tmp_path / mode), 20, {**setting, "balance.mode": mode})
        for mode in ("read", "exchange")
    )
    for a, b in zip(read, exchanged, strict=True):
        assert a["samples"] == b["samples"]
        assert {name: tensor.tolist() for name, tensor in a["weights"].items()} == {
            name: tensor.tolist() for name, tensor in b["weights"].items()
        }
    orders = [rank["exchanges"][-200:] for rank in exchanged]
    assert all(order == orders[0] for order in orders)
    assert len(orders[0]) > 100
    assert sum(sum(report["balance"]["moved_bytes"]) for report in exchanged[0]["reports"]) > 0
    assert sum(sum(report["balance"]["moved_bytes"]) for report in read[0]["reports"]) == 0


def test_balance_metrics_are_recorded_and_reported(pools, data, tmp_path):
    results = pools[2].run(train, data, str(tmp_path), 40, {"balance.policy": "refined", "batch.batch_size": 8})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {span.rank for span in load_spans(tmp_path / "trace.jsonl")} == {0, 1}
    perfetto = json.loads((tmp_path / "trace.perfetto.json").read_text())["traceEvents"]
    assert {event["pid"] for event in perfetto} == {0, 1}
    steps = [line["balance"] for line in lines if line["kind"] == "step"]
    assert [step for line in steps for step in line["steps"]] == list(range(1, 41))
    for name in ("straggler", "imbalance", "predicted_imbalance", "max_token_gap", "moved_bytes"):
        values = [value for line in steps for value in line[name]]
        assert len(values) == 40
        assert min(values) >= 0
        assert name in ("max_token_gap", "moved_bytes") or max(values) < 1
    assert results[0]["reports"][-1]["balance"] == results[1]["reports"][-1]["balance"]
    assert "Waiting for other ranks" in write_report(tmp_path).read_text()


def test_balance_fitted_costs_are_replayed(pools, data, tmp_path):
    wrong = {"balance.cost.token": 1e-9, "balance.cost.token_squared": 1.0, "batch.num_micro_batches": 1}
    setting = {**wrong, "batch.batch_size": 16, "balance.policy": "refined", "balance.fit_every_steps": 40}
    results = pools[2].run(train_with_times, data, str(tmp_path / "fitted"), 84, setting)
    (change,) = results[0]["changes"]
    assert change["step"] == 40
    assert change["cost"]["token"] == pytest.approx(TRUTH.token, rel=1e-6)
    assert change["cost"]["token_squared"] == pytest.approx(TRUTH.token_squared, rel=1e-6)
    events = [json.loads(line) for line in (tmp_path / "fitted" / "metrics.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if "cost of a sample fitted" in event.get("text", "")] == [40]
    # Before the change, samples are balanced by the wrong cost, and after it by the true cost.
    gaps = [gap for report in results[0]["reports"] for gap in report["balance"]["max_token_gap"]]
    assert sum(gaps[-30:]) < sum(gaps[:30])

    again = {**setting, "balance.replay_changes": json.dumps(results[0]["changes"]), "balance.fit_every_steps": "none"}
    replayed = pools[2].run(train, data, str(tmp_path / "replayed"), 84, again)
    for a, b in zip(results, replayed, strict=True):
        assert a["samples"] == b["samples"]
        assert a["changes"] == b["changes"] == results[0]["changes"]
        assert a["loss"] == b["loss"]


def test_balance_resumed_run_uses_fitted_costs(pools, data, tmp_path):
    wrong = {"balance.cost.token": 1e-9, "balance.cost.token_squared": 1.0, "batch.num_micro_batches": 1}
    setting = {**wrong, "batch.batch_size": 16, "balance.policy": "refined", "balance.fit_every_steps": 40}
    uninterrupted = pools[2].run(train_with_times, data, str(tmp_path / "uninterrupted"), 60, setting)
    pools[2].run(train_with_times, data, str(tmp_path / "cut"), 45, setting)  # the change is decided but not effective
    resumed = pools[2].run(train_with_times, data, str(tmp_path / "cut"), 60, setting)
    for a, b in zip(uninterrupted, resumed, strict=True):
        assert a["samples"][45:] == b["samples"]
        assert a["changes"] == b["changes"]
        assert {name: tensor.tolist() for name, tensor in a["weights"].items()} == {
            name: tensor.tolist() for name, tensor in b["weights"].items()
        }
