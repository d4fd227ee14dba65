"""What goes wrong on one rank of a training is a clear error on every rank, within a bounded time."""

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from training_jobs import fill_disk_of_one_rank, no_data, other_width_on_last_rank, train, train_on_full_disk

from nestrec.base import errors
from nestrec.checkpoint import CheckpointManager, verify
from nestrec.checkpoint.checkpoint_manifest import committed_steps
from nestrec.serving.fleet.readiness_probes import free_port
from nestrec.training.state import run_digest
from support.command_runner import RunningProcess, start
from support.rank_pool import RankFailure
from support.tiny_runs import command_of, make_datasets

LIMIT_S = 140  # on a machine that others share
pytestmark = pytest.mark.timeout(3 * LIMIT_S)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    make_datasets(folder)
    return str(folder)


def check_same_error_everywhere(outcomes: list[RankFailure], kind: str, words: str) -> None:
    assert all(isinstance(o, RankFailure) and o.kind == kind and words in o.text for o in outcomes), outcomes
    assert len({o.text.split("Traceback")[0] for o in outcomes}) == 1


def test_a_rank_with_another_configuration_is_named_with_the_field(pools, data: str, tmp_path: Path) -> None:
    outcomes = pools[4].outcomes(other_width_on_last_rank, data, str(tmp_path))
    check_same_error_everywhere(outcomes, "UserError", "task.encoder.dim=8: differs between ranks: rank 3 has 12")


def test_missing_data_is_said_by_every_rank(pools, tmp_path: Path) -> None:
    outcomes = pools[2].outcomes(no_data, str(tmp_path))
    check_same_error_everywhere(
        outcomes, "UserError", "data.folder=/nowhere: there is no prepared dataset here (rank 0)"
    )


def test_a_second_place_that_only_one_process_sees_is_refused(pools, data: str, tmp_path: Path) -> None:
    outcomes = pools[2].outcomes(train, "hstu", data, str(tmp_path), {"training.checkpoint_address": "memory://run"})
    check_same_error_everywhere(outcomes, "UserError", "training.checkpoint_address=memory://run: is memory of")


@pytest.mark.parametrize("saving", [{}, {"training.checkpoint_async": True}], ids=["waiting", "background"])
def test_a_full_disk_of_one_rank_ends_all_and_leaves_the_last_checkpoint(
    pools, data: str, tmp_path: Path, saving: dict[str, object]
) -> None:
    more = {"training.max_steps": 12, "training.checkpoint_every_steps": 4, "training.evaluate_every_epochs": 0}
    pools[2].run(train, "hstu", data, str(tmp_path / "whole"), more)
    outcomes = pools[2].outcomes(fill_disk_of_one_rank, "hstu", data, str(tmp_path / "cut"), {**more, **saving})
    words = "the checkpoint of step 8 could not be written"
    check_same_error_everywhere(outcomes, "CheckpointSaveError", words)
    assert "rank 1: OSError: [Errno 27] File too large" in outcomes[0].text
    assert CheckpointManager(tmp_path / "cut" / "checkpoints").steps() == [4]
    assert verify(tmp_path / "cut" / "checkpoints" / "step-00000004") == []
    pools[2].run(train, "hstu", data, str(tmp_path / "cut"), more)
    assert run_digest(tmp_path / "cut") == run_digest(tmp_path / "whole")


@pytest.mark.parametrize("file", ["config.json", "metrics.jsonl"])
def test_a_run_folder_on_a_full_disk_is_said_by_every_rank(pools, data: str, tmp_path: Path, file: str) -> None:
    more = {"training.max_steps": 21, "training.evaluate_every_epochs": 0, "pipeline.schedule": "nested"}
    job = train
    if file == "config.json":
        job = train_on_full_disk
    else:
        (tmp_path / file).symlink_to("/dev/full")
    outcomes = pools[2].outcomes(job, "rows", data, str(tmp_path), more)
    check_same_error_everywhere(outcomes, "UserError", "cannot be written: No space left on device (rank 0)")
    assert f"RUN = '{tmp_path}" in outcomes[1].text


def start_ranks(command: list[str], world: int, log: Path) -> list[RunningProcess]:
    """The ranks of a run without a launcher, which would end the survivors itself."""
    common = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)} for rank in range(world)]
    return [
        start(command, is_forked=True, env={**common, **place}, cwd=None, output=log / f"{place['RANK']}.txt")
        for place in places
    ]


def test_a_rank_that_dies_ends_the_others_with_their_own_exit_code(data: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    more = {"training.max_steps": 100_000, "training.epochs": 100_000, "training.checkpoint_every_steps": 5}
    ranks = start_ranks(command_of("hstu", Path(data), run, more), 2, tmp_path)
    try:
        deadline_s = time.monotonic() + LIMIT_S
        while not committed_steps(run / "checkpoints") and time.monotonic() < deadline_s:
            with contextlib.suppress(psutil.TimeoutExpired):
                ranks[0].wait(timeout=0.01)  # asking without a pause would take a core from the ranks
            assert all(rank.poll() is None for rank in ranks), (tmp_path / "0.txt").read_text()
        ranks[1].send_signal(signal.SIGKILL)
        assert ranks[0].wait(LIMIT_S) == errors.PEER_LOST
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    said = (tmp_path / "0.txt").read_text()
    assert "error: a peer was lost in " in said
    assert "Restart all ranks from the last checkpoint" in said
    assert "Traceback" not in said
    assert CheckpointManager(run / "checkpoints").restore_latest() is not None
