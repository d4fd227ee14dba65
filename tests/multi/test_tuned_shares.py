"""FreeScale's AutoTune in a run: shares of ranks follow their measured times, agreed, logged, saved and replayed."""

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
"""the first of two ranks takes twice the time, which no cost of samples can know"""
POWER = {"balance.policy": "power", "batch.batch_samples": 24, "batch.micro_batches": 1}
TUNED = {**POWER, "balance.tune_every_steps": 20}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tuned")
    make_datasets(folder)
    return str(folder)


@pytest.fixture(scope="module")
def tuned(pools, data, tmp_path_factory) -> tuple[str, list[dict[str, Any]]]:
    """Folder and results of a run whose shares were tuned several times."""
    folder = str(tmp_path_factory.mktemp("run"))
    return folder, pools[2].run(train_with_times, data, folder, 100, TUNED, SLOW)


@pytest.fixture(scope="module")
def stopped(pools, data, tmp_path_factory) -> Path:
    """The same run, stopped when its first shares were decided and not yet in force."""
    folder = tmp_path_factory.mktemp("stopped")
    pools[2].run(train_with_times, data, str(folder), 45, TUNED, SLOW)
    return folder


def waits(results: list[dict[str, Any]], steps: slice) -> float:
    """Mean part of the slower rank's time that the other waits."""
    times = np.array([rank["times"][steps] for rank in results])
    return float(1 - times.mean() / times.max(axis=0).mean())


def test_a_slow_rank_is_given_less_until_all_take_the_same_time(tuned):
    folder, results = tuned
    assert waits(results, slice(40)) > 0.2
    assert waits(results, slice(80, None)) < 0.6 * waits(results, slice(40))
    shares = [change["tuning"]["shares"] for change in results[0]["changes"]]
    assert len(shares) >= 2
    assert 0.5 > shares[0][0] > shares[-1][0]
    assert results[0]["changes"] == results[1]["changes"], "one value for all ranks"
    events = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    said = [event["step"] for event in events if "shares of ranks tuned" in event.get("text", "")]
    assert said == [change["step"] for change in results[0]["changes"]]


@pytest.mark.slow
def test_tuned_shares_are_replayed(pools, data, tuned, tmp_path):
    _, results = tuned
    again = {**POWER, "balance.replay": json.dumps(results[0]["changes"])}
    replayed = pools[2].run(train, data, str(tmp_path), 60, again)
    for a, b in zip(results, replayed, strict=True):
        assert a["samples"][:60] == b["samples"]
        assert a["loss"][:3] == b["loss"][:3]


def test_a_resumed_run_deals_by_the_shares_it_had(pools, data, tuned, stopped, tmp_path):
    _, whole = tuned
    rest = pools[2].run(train_with_times, data, copied(stopped, tmp_path), 65, TUNED, SLOW)
    for a, b in zip(whole, rest, strict=True):
        assert a["samples"][45:65] == b["samples"]
        assert not any("dropped" in warning for warning in b["warnings"])


def copied(run: Path, folder: Path) -> str:
    shutil.copytree(run, folder, dirs_exist_ok=True)
    return str(folder)


def test_shares_are_dropped_on_another_number_of_ranks_and_the_run_says_so(data, stopped, tmp_path):
    alone = train_with_times(Topology.single(), data, copied(stopped, tmp_path), 48, TUNED)
    assert any("shares tuned for 2 ranks are dropped: there are 1 now" in warning for warning in alone["warnings"])
    assert [change["tuning"] for change in alone["changes"]] == [None]


def test_shares_of_another_number_of_ranks_and_other_policies_are_refused(data, tmp_path):
    given = {"balance.tuning": json.dumps({"alpha": 1.0, "shares": [0.5, 0.5]})}
    with pytest.raises(UserError, match="has shares of 2 ranks, and there are 1"):
        train(Topology.single(), data, str(tmp_path), 4, {**POWER, **given})
    with pytest.raises(UserError, match="has no shares to tune"):
        train(Topology.single(), data, str(tmp_path), 4, {**TUNED, "balance.policy": "greedy"})
