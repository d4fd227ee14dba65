"""An error on one rank of a training run is a clear error on every rank, within a bounded time."""

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

LIMIT_S = 140  # long enough for a machine with other load
pytestmark = pytest.mark.timeout(3 * LIMIT_S)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    make_datasets(folder)
    return str(folder)


def check_same_error_on_all_ranks(outcomes: list[RankFailure], kind: str, message: str) -> None:
    assert all(isinstance(o, RankFailure) and o.kind == kind and message in o.text for o in outcomes), outcomes
    assert len({o.text.split("Traceback")[0] for o in outcomes}) == 1


def test_training_rank_with_other_config_is_named(pools, data: str, tmp_path: Path) -> None:
    outcomes = pools[4].outcomes(other_width_on_last_rank, data, str(tmp_path))
    message = "task.encoder.dim=8: must be equal on all ranks, but rank 3 has 12"
    check_same_error_on_all_ranks(outcomes, "UserError", message)


def test_training_missing_data_is_reported_by_all_ranks(pools, tmp_path: Path) -> None:
    outcomes = pools[2].outcomes(no_data, str(tmp_path))
    check_same_error_on_all_ranks(
        outcomes, "UserError", "data.folder=/nowhere: the folder does not contain a prepared dataset (rank 0)"
    )


def test_training_rejects_checkpoint_mirror_in_process_memory(pools, data: str, tmp_path: Path) -> None:
    outcomes = pools[2].outcomes(train, "hstu", data, str(tmp_path), {"training.checkpoint_mirror": "memory://run"})
    message = "training.checkpoint_mirror=memory://run: memory is local to each process"
    check_same_error_on_all_ranks(outcomes, "UserError", message)


@pytest.mark.parametrize("saving", [{}, {"training.checkpoint_async": True}], ids=["waiting", "background"])
def test_training_full_disk_of_one_rank_keeps_checkpoint(
    pools, data: str, tmp_path: Path, saving: dict[str, object]
) -> None:
    more = {"training.max_steps": 12, "training.checkpoint_every_steps": 4, "training.eval_every_epochs": 0}
    pools[2].run(train, "hstu", data, str(tmp_path / "uninterrupted"), more)
    outcomes = pools[2].outcomes(fill_disk_of_one_rank, "hstu", data, str(tmp_path / "cut"), {**more, **saving})
    message = "The checkpoint of step 8 could not be written"
    check_same_error_on_all_ranks(outcomes, "CheckpointSaveError", message)
    assert "rank 1: OSError: [Errno 27] File too large" in outcomes[0].text
    assert CheckpointManager(tmp_path / "cut" / "checkpoints").steps() == [4]
    assert verify(tmp_path / "cut" / "checkpoints" / "step-00000004") == []
    pools[2].run(train, "hstu", data, str(tmp_path / "cut"), more)
    assert run_digest(tmp_path / "cut") == run_digest(tmp_path / "uninterrupted")


@pytest.mark.parametrize("file", ["config.json", "metrics.jsonl"])
def test_training_full_disk_of_run_folder_is_reported(pools, data: str, tmp_path: Path, file: str) -> None:
    more = {"training.max_steps": 21, "training.eval_every_epochs": 0, "pipeline.schedule": "nested"}
    job = train
    if file == "config.json":
        job = train_on_full_disk
    else:
        (tmp_path / file).symlink_to("/dev/full")
    outcomes = pools[2].outcomes(job, "rows", data, str(tmp_path), more)
    check_same_error_on_all_ranks(outcomes, "UserError", "cannot write: No space left on device (rank 0)")
    assert f"RUN={tmp_path}" in outcomes[1].text


def start_ranks(command: list[str], world: int, log: Path) -> list[RunningProcess]:
    """Start the ranks of a run without a launcher, because a launcher would end the survivors itself."""
    common = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        start(
            command,
            is_forked=True,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)},
            cwd=None,
            output=log / f"{rank}.txt",
        )
        for rank in range(world)
    ]


def test_training_peer_failure_exit_code(data: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    more = {"training.max_steps": 100_000, "training.epochs": 100_000, "training.checkpoint_every_steps": 5}
    ranks = start_ranks(command_of("hstu", Path(data), run, more), 2, tmp_path)
    try:
        deadline_s = time.monotonic() + LIMIT_S
        while not committed_steps(run / "checkpoints") and time.monotonic() < deadline_s:
            with contextlib.suppress(psutil.TimeoutExpired):
                ranks[0].wait(timeout=0.01)  # polling without a pause would take a core from the ranks
            assert all(rank.poll() is None for rank in ranks), (tmp_path / "0.txt").read_text()
        ranks[1].send_signal(signal.SIGKILL)
        assert ranks[0].wait(LIMIT_S) == errors.PEER_LOST
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    output = (tmp_path / "0.txt").read_text()
    assert "error: A peer was lost in " in output
    assert "Restart all ranks from the last checkpoint" in output
    assert "Traceback" not in output
    assert CheckpointManager(run / "checkpoints").restore_latest() is not None
