"""Power tuning (FreeScale's AutoTune): shares of ranks follow measured times, and are logged, saved and replayed."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from balance_jobs import train, train_with_times

from nestrec.base.errors import UserError
from nestrec.distributed import Topology
from support.tiny_runs import make_datasets

SLOW = (2.0, 1.0)
"""Factors of the compute times of two ranks; the cost model of samples cannot predict them."""
POWER = {"balance.policy": "power", "batch.batch_size": 24, "batch.num_micro_batches": 1}
TUNED = {**POWER, "balance.tune_every_steps": 20}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tuned")
    make_datasets(folder)
    return str(folder)


@pytest.fixture(scope="module")
def tuned(pools, data, tmp_path_factory) -> tuple[str, list[dict[str, Any]]]:
    """Return folder and results of a run whose shares were tuned several times."""
    folder = str(tmp_path_factory.mktemp("run"))
    return folder, pools[2].run(train_with_times, data, folder, 100, TUNED, SLOW)


@pytest.fixture(scope="module")
def stopped(pools, data, tmp_path_factory) -> Path:
    """Return the folder of the same run, stopped after its first shares were decided and before they took effect."""
    folder = tmp_path_factory.mktemp("stopped")
    pools[2].run(train_with_times, data, str(folder), 45, TUNED, SLOW)
    return folder


def wait_fraction(results: list[dict[str, Any]], steps: slice) -> float:
    """Return the mean fraction of the step time for which the faster rank waits."""
    times = np.array([rank["times"][steps] for rank in results])
    return float(1 - times.mean() / times.max(axis=0).mean())


def test_power_tuning_gives_slow_rank_fewer_samples(tuned):
    folder, results = tuned
    assert wait_fraction(results, slice(40)) > 0.2
    assert wait_fraction(results, slice(80, None)) < 0.6 * wait_fraction(results, slice(40))
    shares = [change["tuning"]["shares"] for change in results[0]["changes"]]
    assert len(shares) >= 2
    assert 0.5 > shares[0][0] > shares[-1][0]
    assert results[0]["changes"] == results[1]["changes"], "one value for all ranks"
    events = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    tuned_at = [event["step"] for event in events if "shares of ranks tuned" in event.get("text", "")]
    assert tuned_at == [change["step"] for change in results[0]["changes"]]


@pytest.mark.slow
def test_power_tuning_shares_are_replayed(pools, data, tuned, tmp_path):
    _, results = tuned
    replay = {**POWER, "balance.replay_changes": json.dumps(results[0]["changes"])}
    replayed = pools[2].run(train, data, str(tmp_path), 60, replay)
    for a, b in zip(results, replayed, strict=True):
        assert a["samples"][:60] == b["samples"]
        assert a["loss"][:3] == b["loss"][:3]


def test_power_tuning_resumed_run_keeps_shares(pools, data, tuned, stopped, tmp_path):
    _, uninterrupted = tuned
    resumed = pools[2].run(train_with_times, data, copy_run(stopped, tmp_path), 65, TUNED, SLOW)
    for a, b in zip(uninterrupted, resumed, strict=True):
        assert a["samples"][45:65] == b["samples"]
        assert not any("dropped" in warning for warning in b["warnings"])


def copy_run(run: Path, folder: Path) -> str:
    shutil.copytree(run, folder, dirs_exist_ok=True)
    return str(folder)


def test_power_tuning_drops_shares_of_other_world_size(data, stopped, tmp_path):
    alone = train_with_times(Topology.single(), data, copy_run(stopped, tmp_path), 48, TUNED)
    message = "dropped the tuned shares of 2 ranks, because the run now has 1"
    assert any(message in warning for warning in alone["warnings"])
    assert [change["tuning"] for change in alone["changes"]] == [None]


def test_power_tuning_rejects_invalid_shares(data, tmp_path):
    two_shares = {"balance.power_tuning": json.dumps({"alpha": 1.0, "shares": [0.5, 0.5]})}
    with pytest.raises(UserError, match=r"must have one share per rank: it has 2, but the run has 1 rank\b"):
        train(Topology.single(), data, str(tmp_path), 4, {**POWER, **two_shares})
    with pytest.raises(UserError, match="requires the power policy"):
        train(Topology.single(), data, str(tmp_path), 4, {**TUNED, "balance.policy": "greedy"})
