"""A checkpoint names its run, seed, model and option history; one that does not match is rejected or renamed."""

import dataclasses
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from nestrec.base.errors import CorruptFileError, UserError
from nestrec.checkpoint import CheckpointManager, CheckpointSaveError
from nestrec.data.synthetic.synthetic_logs import generate, preset
from nestrec.distributed import Topology
from nestrec.exporters.servable_writer import export_run
from nestrec.training.callbacks import TrainingCallback
from nestrec.training.state import run_digest
from nestrec.training.trainer import Trainer
from support.fail_points import armed
from support.tiny_runs import config_of

RUN = {"training.max_steps": 6, "training.max_checkpoints": 9, "training.checkpoint_every_steps": 2}
RATE = "optimizer.learning_rate"


class WarningRecorder(TrainingCallback):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def on_warning(self, message: str) -> None:
        self.warnings.append(message)


def trainer_of(
    data: Path, run: Path, overrides: Mapping[str, object] | None = None, recorder: WarningRecorder | None = None
) -> Trainer:
    return Trainer(config_of("hstu", data, {**RUN, **(overrides or {})}), run, Topology.single(), recorder)


def check_best_weights_match_score(trainer: Trainer) -> None:
    """Checks that the stored best weights have the best score of the run's state."""
    best = trainer.state.best_score
    assert best is not None
    assert trainer.measure("valid", best=True).score == best


def raise_error() -> None:
    raise RuntimeError


def crash_after_first_best_weights(data: Path, run: Path) -> None:
    """Trains until a crash between the first best weights and the first checkpoint."""
    with armed("checkpoint.after_rename", raise_error, at=1), pytest.raises(CheckpointSaveError):
        trainer_of(data, run, {"training.checkpoint_every_steps": "none"}).train()
    assert CheckpointManager(run / "best").steps() == [3]
    assert CheckpointManager(run / "checkpoints").steps() == []


def test_checkpoint_best_only_rejects_another_seed(tiny_data, tmp_path):
    crash_after_first_best_weights(tiny_data, tmp_path)
    with pytest.raises(UserError, match="cannot change when a run resumes") as raised:
        trainer_of(tiny_data, tmp_path, {"training.seed": 7}).train()
    assert raised.value.option == "training.seed"
    (tmp_path / "config.json").unlink()
    with pytest.raises(
        UserError, match=r"the checkpoint has another seed: training\.seed is 42 in the checkpoint and 7 in this run"
    ):
        trainer_of(tiny_data, tmp_path, {"training.seed": 7}).train()
    trainer = trainer_of(tiny_data, tmp_path)
    trainer.train()
    check_best_weights_match_score(trainer)


def test_checkpoint_best_only_restarts_with_other_learning_rates(tiny_data, tmp_path):
    crash_after_first_best_weights(tiny_data, tmp_path)
    recorder = WarningRecorder()
    overrides = {RATE: 0.05, "optimizer.table_learning_rate": 0.5}
    trainer = trainer_of(tiny_data, tmp_path, overrides, recorder)
    trainer.train()
    assert "from another branch of the run; it was renamed to" in recorder.warnings[0]
    check_best_weights_match_score(trainer)


def test_best_weights_of_an_abandoned_branch_are_dropped(tiny_data, tmp_path):
    """The checkpoints after step 2 are lost, and the run resumes from there with other learning rates."""
    first = trainer_of(tiny_data, tmp_path)
    first.train()
    assert CheckpointManager(tmp_path / "best").steps()[0] > 2
    for step in (4, 6):
        shutil.rmtree(tmp_path / "checkpoints" / f"step-{step:08d}")
    for rate in (0.0, 0.05):
        trainer = trainer_of(tiny_data, tmp_path, {RATE: rate, "optimizer.table_learning_rate": rate})
        trainer.train()
        check_best_weights_match_score(trainer)
        for step in (4, 6):
            shutil.rmtree(tmp_path / "checkpoints" / f"step-{step:08d}")


def test_best_weights_are_kept_when_their_steps_are_repeated(tiny_data, tmp_path):
    trainer_of(tiny_data, tmp_path).train()
    expected = run_digest(tmp_path)
    best = (tmp_path / "best").stat().st_mtime_ns
    for step in (4, 6):
        shutil.rmtree(tmp_path / "checkpoints" / f"step-{step:08d}")
    trainer = trainer_of(tiny_data, tmp_path, {"training.max_checkpoints": 8})
    trainer.train()
    assert run_digest(tmp_path) == expected
    assert (tmp_path / "best").stat().st_mtime_ns == best
    check_best_weights_match_score(trainer)


def test_best_weights_are_written_before_their_checkpoint(tiny_data, tmp_path):
    """This holds for background saves, too: a kill in between must not leave a state without its best weights."""
    other_is_done = threading.Event()
    observed = []

    def observe() -> None:
        observed.append([CheckpointManager(tmp_path / part).steps() for part in ("best", "checkpoints")])
        other_is_done.set()

    overrides = {"training.max_steps": 3, "training.checkpoint_every_steps": "none", "training.checkpoint_async": True}
    with (
        armed("checkpoint.before_first_file", lambda: other_is_done.wait(0.3), at=1),
        armed("checkpoint.after_rename", observe),
    ):
        trainer_of(tiny_data, tmp_path, overrides).train()
    assert observed[:2] == [[[3], []], [[3], [3]]]


def test_checkpoint_identity_has_run_seed_model_and_history(tiny_data, tmp_path):
    trainer_of(tiny_data, tmp_path).train()
    trainer_of(tiny_data, tmp_path, {"training.max_steps": 8, RATE: 0.5}).train()
    checkpoints = CheckpointManager(tmp_path / "checkpoints")
    early, late = (checkpoints.restore(step).state["identity"] for step in (6, 8))
    assert early["run"] == late["run"]
    assert (early["seed"], early["model"]["task.encoder.dim"]) == (42, 8)
    assert [step for step, _ in early["course"]] == [0]
    assert late["course"] == [*early["course"], [6, {RATE: 0.5}]]


@pytest.mark.parametrize("part", ["checkpoints", "best"])
def test_checkpoint_of_another_run_is_rejected_with_differences(tiny_data, tmp_path, part):
    other = {"training.seed": 7, "task.table_optimizer.kind": "sgd"}
    trainer_of(tiny_data, tmp_path / "other", other).train()
    trainer_of(tiny_data, tmp_path / "run").train()
    shutil.rmtree(tmp_path / "run" / part)
    shutil.copytree(tmp_path / "other" / part, tmp_path / "run" / part)
    config = (tmp_path / "run" / "config.json").read_text()
    actions = [
        lambda: trainer_of(tiny_data, tmp_path / "run", {"training.max_steps": 8}).train(),
        lambda: trainer_of(tiny_data, tmp_path / "run").measure("test", best=part == "best"),
        lambda: export_run(tmp_path / "run", tmp_path / "model", best=part == "best"),
    ]
    for action in actions:
        with pytest.raises(UserError, match="the checkpoint has another run and seed and model") as raised:
            action()
        assert "training.seed is 7 in the checkpoint and 42 in this run" in str(raised.value)
        assert "is 'sgd' in the checkpoint and 'adam' in this run" in str(raised.value)
        assert part in raised.value.value
        assert "another folder (--output)" in raised.value.remedy
    assert (tmp_path / "run" / "config.json").read_text() == config


def test_checkpoint_of_another_branch_of_the_run_is_rejected(tiny_data, tmp_path):
    trainer_of(tiny_data, tmp_path / "run").train()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    trainer_of(tiny_data, tmp_path / "copy", {RATE: 0.5, "training.max_steps": 8}).train()
    trainer_of(tiny_data, tmp_path / "run", {"training.max_steps": 8}).train()
    newest = "checkpoints/step-00000008"
    shutil.rmtree(tmp_path / "run" / newest)
    shutil.copytree(tmp_path / "copy" / newest, tmp_path / "run" / newest)
    with pytest.raises(
        UserError, match=r"another option history: optimizer\.learning_rate is 0\.5 in the checkpoint and 0\.003 in"
    ):
        trainer_of(tiny_data, tmp_path / "run", {"training.max_steps": 10}).train()


def test_checkpoint_copied_alone_resumes_only_with_same_config(tiny_data, tmp_path):
    trainer_of(tiny_data, tmp_path / "run").train()
    shutil.copytree(tmp_path / "run" / "checkpoints", tmp_path / "copy" / "checkpoints")
    with pytest.raises(UserError, match="the checkpoint has another seed"):
        trainer_of(tiny_data, tmp_path / "copy", {"training.seed": 7}).train()
    for run in ("run", "copy"):
        trainer_of(tiny_data, tmp_path / run, {"training.max_steps": 9}).train()
    assert run_digest(tmp_path / "copy") == run_digest(tmp_path / "run")
    names = [
        CheckpointManager(tmp_path / run / "checkpoints").restore(9).state["identity"]["run"] for run in ("run", "copy")
    ]
    assert names[0] == names[1]


def test_checkpoint_without_identity_is_resumed(tiny_data, tmp_path):
    old = trainer_of(tiny_data, tmp_path / "old", {"training.max_steps": 4})
    old.train()
    CheckpointManager(tmp_path / "run" / "checkpoints").save(4, old.session.checkpoint_content(old.state))
    trainer_of(tiny_data, tmp_path / "old").train()
    trainer_of(tiny_data, tmp_path / "run").train()
    assert run_digest(tmp_path / "run") == run_digest(tmp_path / "old")


def test_checkpoint_mirror_resumes_in_an_empty_folder(tiny_data, tmp_path):
    mirror_options = {"training.checkpoint_mirror": str(tmp_path / "elsewhere")}
    trainer_of(tiny_data, tmp_path / "one", {**mirror_options, "training.max_steps": 4}).train()
    for run, overrides in (("other", mirror_options), ("uninterrupted", {})):
        trainer = trainer_of(tiny_data, tmp_path / run, overrides)
        trainer.train()
        check_best_weights_match_score(trainer)
    assert run_digest(tmp_path / "other") == run_digest(tmp_path / "uninterrupted")
    assert '"resumed from step 4"' in (tmp_path / "other" / "metrics.jsonl").read_text()
    best = trainer.measure("test", best=True).score
    shutil.rmtree(tmp_path / "other" / "best")
    assert trainer_of(tiny_data, tmp_path / "other", mirror_options).measure("test", best=True).score == best


def test_checkpoint_mirror_of_another_run_is_not_overwritten(tiny_data, tmp_path):
    mirror_options = {"training.checkpoint_mirror": (tmp_path / "elsewhere").as_uri(), "training.max_steps": 4}
    trainer_of(tiny_data, tmp_path / "one", mirror_options).train()
    copied = sorted((tmp_path / "elsewhere").rglob("*"))
    trainer_of(tiny_data, tmp_path / "two", {"training.max_steps": 2}).train()
    with pytest.raises(UserError, match="contains checkpoints of another run") as error:
        trainer_of(tiny_data, tmp_path / "two", mirror_options).train()
    assert error.value.option == "training.checkpoint_mirror"
    assert sorted((tmp_path / "elsewhere").rglob("*")) == copied
    trainer_of(tiny_data, tmp_path / "one", {**mirror_options, "training.max_steps": 5}).train()


@pytest.mark.parametrize("address", ["file://", "nosuch://bucket/run"])
def test_checkpoint_mirror_invalid_address_is_rejected_at_start(tiny_data, tmp_path, address):
    with pytest.raises(UserError) as error:
        trainer_of(tiny_data, tmp_path, {"training.checkpoint_mirror": address})
    assert (error.value.option, error.value.value) == ("training.checkpoint_mirror", address)


@pytest.mark.parametrize("is_known", [False, True])
def test_checkpoint_mirror_of_another_seed_is_rejected(tiny_data, tmp_path, is_known):
    mirror_options = {"training.checkpoint_mirror": str(tmp_path / "elsewhere"), "training.max_steps": 2}
    trainer_of(tiny_data, tmp_path / "run", mirror_options).train()
    other = tmp_path / "other"
    if is_known:  # an independent run whose checkpoints were lost
        trainer_of(tiny_data, other, {"training.seed": 7, "training.max_steps": 2}).train()
        shutil.rmtree(other / "checkpoints")
        shutil.rmtree(other / "best", ignore_errors=True)
    with pytest.raises(
        UserError, match=r"another (run and )?seed: .*training\.seed is 42 in the checkpoint and 7 in this run"
    ) as raised:
        trainer_of(tiny_data, other, {**mirror_options, "training.seed": 7}).train()
    assert raised.value.option == "training.checkpoint_mirror"
    assert not list(other.glob("*/step-*"))


def test_checkpoint_mirror_of_other_data_is_rejected(tiny_data, tmp_path):
    other = dataclasses.replace(preset("tiny", num_users=40, num_items=60), num_topics=1, max_length=24, seed=7)
    generate(other, tmp_path / "data" / "sequences")
    mirror_options = {"training.checkpoint_mirror": str(tmp_path / "there"), "training.max_steps": 2}
    trainer_of(tiny_data, tmp_path / "one", mirror_options).train()
    copied = contents_of(tmp_path / "there")
    with pytest.raises(UserError, match="this run was trained on other data") as raised:
        trainer_of(tmp_path / "data", tmp_path / "two", mirror_options).train()
    assert str(tmp_path / "there" / "card.json") in raised.value.problem
    assert raised.value.value == str(tmp_path / "data" / "sequences")
    assert contents_of(tmp_path / "there") == copied
    assert not list((tmp_path / "two").rglob("step-*"))
    trainer_of(tiny_data, tmp_path / "two", mirror_options).train()


def contents_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def truncate_all(folder: Path, name: str) -> None:
    files = list(folder.rglob(name))
    assert len(files) > 1
    for file in files:
        file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("name", ["state.json", "manifest.json"])
@pytest.mark.parametrize("is_empty", [True, False])
def test_checkpoint_mirror_corrupt_stops_the_run_and_is_kept(tiny_data, tmp_path, name, is_empty):
    """An empty folder has nothing to resume from; otherwise the owner of the checkpoints in the mirror is unknown."""
    mirror = tmp_path / "there"
    mirror_options = {"training.checkpoint_mirror": str(mirror), "training.max_steps": 4}
    trainer_of(tiny_data, tmp_path / "one", mirror_options).train()
    truncate_all(mirror, name)
    copied = contents_of(mirror)
    if not is_empty:
        trainer_of(tiny_data, tmp_path / "two", {"training.max_steps": 2}).train()
    with pytest.raises(CorruptFileError, match="all checkpoints in the mirror are corrupt") as raised:
        trainer_of(tiny_data, tmp_path / "two", mirror_options).train()
    assert raised.value.option == "training.checkpoint_mirror"
    assert name.removesuffix(".json") in raised.value.problem
    assert contents_of(mirror) == copied


def test_checkpoint_mirror_corrupt_of_own_run_is_replaced(tiny_data, tmp_path):
    mirror = tmp_path / "there"
    mirror_options = {"training.checkpoint_mirror": str(mirror), "training.max_steps": 4}
    trainer_of(tiny_data, tmp_path / "run", mirror_options).train()
    truncate_all(mirror, "state.json")
    trainer_of(tiny_data, tmp_path / "run", {**mirror_options, "training.max_steps": 6}).train()
    assert CheckpointManager(mirror / "checkpoints").state(6) is not None


def test_checkpoint_mirror_unreadable_storage_stops_the_run(tiny_data, tmp_path, monkeypatch):
    monkeypatch.setattr("nestrec.artifacts.storage.RETRY_AFTER_S", ())
    mirror = tmp_path / "there"
    mirror_options = {"training.checkpoint_mirror": str(mirror), "training.max_steps": 4}
    trainer_of(tiny_data, tmp_path / "one", mirror_options).train()
    copied = contents_of(mirror)
    for file in (mirror / "checkpoints").rglob("state.json"):
        file.unlink()
        file.symlink_to(file.name)  # a link to itself cannot be read
    with pytest.raises(UserError, match=r"cannot (be read|read the file): OSError: .*Too many levels"):
        trainer_of(tiny_data, tmp_path / "two", mirror_options).train()
    remaining = contents_of(mirror)
    assert remaining == {name: content for name, content in copied.items() if name in remaining}
    assert not list((tmp_path / "two").rglob("step-*"))
