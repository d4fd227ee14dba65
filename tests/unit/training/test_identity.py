"""A checkpoint names its run, seed, model and course: another's is refused or set aside, and never measured."""

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

RUN = {"training.max_steps": 6, "training.keep_checkpoints": 9, "training.checkpoint_every_steps": 2}
RATE = "optimizer.learning_rate"


class Heard(TrainingCallback):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warned(self, message: str) -> None:
        self.warnings.append(message)


def trainer_of(data: Path, run: Path, more: Mapping[str, object] | None = None, heard: Heard | None = None) -> Trainer:
    return Trainer(config_of("hstu", data, {**RUN, **(more or {})}), run, Topology.single(), heard)


def check_best_is_its_own(trainer: Trainer) -> None:
    """The weights that are kept as best have the score that the run remembers as its best."""
    best = trainer.state.best_score
    assert best is not None
    assert trainer.measure("valid", best=True).score == best


def raise_error() -> None:
    raise RuntimeError


def cut_after_the_first_best(data: Path, run: Path) -> None:
    """Ended between the first best weights and the first checkpoint."""
    with armed("checkpoint.after_rename", raise_error, at=1), pytest.raises(CheckpointSaveError):
        trainer_of(data, run, {"training.checkpoint_every_steps": "none"}).train()
    assert CheckpointManager(run / "best").steps() == [3]
    assert CheckpointManager(run / "checkpoints").steps() == []


def test_a_run_that_has_only_its_best_weights_is_not_begun_again_with_another_seed(tiny_data, tmp_path):
    cut_after_the_first_best(tiny_data, tmp_path)
    with pytest.raises(UserError, match="may not change while it goes on") as refused:
        trainer_of(tiny_data, tmp_path, {"training.seed": 7}).train()
    assert refused.value.option == "training.seed"
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match=r"the checkpoint is of another seed: training\.seed is 42 there, 7 here"):
        trainer_of(tiny_data, tmp_path, {"training.seed": 7}).train()
    trainer = trainer_of(tiny_data, tmp_path)
    trainer.train()
    check_best_is_its_own(trainer)


def test_a_run_that_has_only_its_best_weights_begins_again_with_other_rates_and_its_own_best(tiny_data, tmp_path):
    cut_after_the_first_best(tiny_data, tmp_path)
    heard = Heard()
    more = {RATE: 0.05, "optimizer.table_learning_rate": 0.5}
    trainer = trainer_of(tiny_data, tmp_path, more, heard)
    trainer.train()
    assert "from another course of training; it is set aside" in heard.warnings[0]
    check_best_is_its_own(trainer)


def test_weights_of_a_course_that_was_left_are_not_kept_as_best(tiny_data, tmp_path):
    """The checkpoints behind step 2 are lost, and the run goes on from there with other rates."""
    first = trainer_of(tiny_data, tmp_path)
    first.train()
    assert CheckpointManager(tmp_path / "best").steps()[0] > 2
    for step in (4, 6):
        shutil.rmtree(tmp_path / "checkpoints" / f"step-{step:08d}")
    for rate in (0.0, 0.05):
        trainer = trainer_of(tiny_data, tmp_path, {RATE: rate, "optimizer.table_learning_rate": rate})
        trainer.train()
        check_best_is_its_own(trainer)
        for step in (4, 6):
            shutil.rmtree(tmp_path / "checkpoints" / f"step-{step:08d}")


def test_going_on_as_before_keeps_best_weights_of_steps_that_come_again(tiny_data, tmp_path):
    trainer_of(tiny_data, tmp_path).train()
    whole = run_digest(tmp_path)
    best = (tmp_path / "best").stat().st_mtime_ns
    for step in (4, 6):
        shutil.rmtree(tmp_path / "checkpoints" / f"step-{step:08d}")
    trainer = trainer_of(tiny_data, tmp_path, {"training.keep_checkpoints": 8})
    trainer.train()
    assert run_digest(tmp_path) == whole
    assert (tmp_path / "best").stat().st_mtime_ns == best
    check_best_is_its_own(trainer)


def test_best_weights_are_written_before_the_checkpoint_that_counts_on_them(tiny_data, tmp_path):
    """In the background, too: a kill in between must not leave a run that believes in weights it does not have."""
    other_is_done = threading.Event()
    found = []

    def look() -> None:
        found.append([CheckpointManager(tmp_path / part).steps() for part in ("best", "checkpoints")])
        other_is_done.set()

    more = {"training.max_steps": 3, "training.checkpoint_every_steps": "none", "training.checkpoint_async": True}
    with (
        armed("checkpoint.before_first_file", lambda: other_is_done.wait(0.3), at=1),
        armed("checkpoint.after_rename", look),
    ):
        trainer_of(tiny_data, tmp_path, more).train()
    assert found[:2] == [[[3], []], [[3], [3]]]


def test_a_checkpoint_tells_its_run_seed_model_and_course(tiny_data, tmp_path):
    trainer_of(tiny_data, tmp_path).train()
    trainer_of(tiny_data, tmp_path, {"training.max_steps": 8, RATE: 0.5}).train()
    checkpoints = CheckpointManager(tmp_path / "checkpoints")
    early, late = (checkpoints.restore(step).state["identity"] for step in (6, 8))
    assert early["run"] == late["run"]
    assert (early["seed"], early["model"]["task.encoder.dim"]) == (42, 8)
    assert [step for step, _ in early["course"]] == [0]
    assert late["course"] == [*early["course"], [6, {RATE: 0.5}]]


@pytest.mark.parametrize("part", ["checkpoints", "best"])
def test_what_was_copied_from_another_run_is_refused_and_told_what_differs(tiny_data, tmp_path, part):
    other = {"training.seed": 7, "task.item_optimizer.kind": "sgd"}
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
        with pytest.raises(UserError, match="the checkpoint is of another run and seed and model") as refused:
            action()
        assert "training.seed is 7 there, 42 here" in str(refused.value)
        assert "is 'sgd' there, 'adam' here" in str(refused.value)
        assert part in refused.value.value
        assert "another one (--output)" in refused.value.remedy
    assert (tmp_path / "run" / "config.json").read_text() == config


def test_a_checkpoint_of_another_course_of_the_same_run_is_refused(tiny_data, tmp_path):
    trainer_of(tiny_data, tmp_path / "run").train()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    trainer_of(tiny_data, tmp_path / "copy", {RATE: 0.5, "training.max_steps": 8}).train()
    trainer_of(tiny_data, tmp_path / "run", {"training.max_steps": 8}).train()
    newest = "checkpoints/step-00000008"
    shutil.rmtree(tmp_path / "run" / newest)
    shutil.copytree(tmp_path / "copy" / newest, tmp_path / "run" / newest)
    with pytest.raises(UserError, match=r"of another course: optimizer\.learning_rate is 0\.5 there, 0\.003 here"):
        trainer_of(tiny_data, tmp_path / "run", {"training.max_steps": 10}).train()


def test_checkpoints_that_were_copied_alone_go_on_under_their_name_with_the_same_config_only(tiny_data, tmp_path):
    trainer_of(tiny_data, tmp_path / "run").train()
    shutil.copytree(tmp_path / "run" / "checkpoints", tmp_path / "copy" / "checkpoints")
    with pytest.raises(UserError, match="the checkpoint is of another seed"):
        trainer_of(tiny_data, tmp_path / "copy", {"training.seed": 7}).train()
    for run in ("run", "copy"):
        trainer_of(tiny_data, tmp_path / run, {"training.max_steps": 9}).train()
    assert run_digest(tmp_path / "copy") == run_digest(tmp_path / "run")
    names = [
        CheckpointManager(tmp_path / run / "checkpoints").restore(9).state["identity"]["run"] for run in ("run", "copy")
    ]
    assert names[0] == names[1]


def test_checkpoints_from_before_they_had_names_go_on(tiny_data, tmp_path):
    old = trainer_of(tiny_data, tmp_path / "old", {"training.max_steps": 4})
    old.train()
    CheckpointManager(tmp_path / "run" / "checkpoints").save(4, old.session.content(old.state))
    trainer_of(tiny_data, tmp_path / "old").train()
    trainer_of(tiny_data, tmp_path / "run").train()
    assert run_digest(tmp_path / "run") == run_digest(tmp_path / "old")


def test_a_run_goes_on_in_an_empty_folder_from_the_address_that_has_its_checkpoints(tiny_data, tmp_path):
    elsewhere = {"training.checkpoint_address": str(tmp_path / "elsewhere")}
    trainer_of(tiny_data, tmp_path / "one", {**elsewhere, "training.max_steps": 4}).train()
    for run, more in (("other", elsewhere), ("whole", {})):
        trainer = trainer_of(tiny_data, tmp_path / run, more)
        trainer.train()
        check_best_is_its_own(trainer)
    assert run_digest(tmp_path / "other") == run_digest(tmp_path / "whole")
    assert '"resumed from step 4"' in (tmp_path / "other" / "metrics.jsonl").read_text()
    best = trainer.measure("test", best=True).score
    shutil.rmtree(tmp_path / "other" / "best")
    assert trainer_of(tiny_data, tmp_path / "other", elsewhere).measure("test", best=True).score == best


def test_a_run_does_not_take_the_place_of_another_ones_copies(tiny_data, tmp_path):
    elsewhere = {"training.checkpoint_address": (tmp_path / "elsewhere").as_uri(), "training.max_steps": 4}
    trainer_of(tiny_data, tmp_path / "one", elsewhere).train()
    copied = sorted((tmp_path / "elsewhere").rglob("*"))
    trainer_of(tiny_data, tmp_path / "two", {"training.max_steps": 2}).train()
    with pytest.raises(UserError, match="holds checkpoints of another run") as error:
        trainer_of(tiny_data, tmp_path / "two", elsewhere).train()
    assert error.value.option == "training.checkpoint_address"
    assert sorted((tmp_path / "elsewhere").rglob("*")) == copied
    trainer_of(tiny_data, tmp_path / "one", {**elsewhere, "training.max_steps": 5}).train()


@pytest.mark.parametrize("address", ["file://", "nosuch://bucket/run"])
def test_an_address_that_is_none_is_named_before_anything_is_trained(tiny_data, tmp_path, address):
    with pytest.raises(UserError) as error:
        trainer_of(tiny_data, tmp_path, {"training.checkpoint_address": address})
    assert (error.value.option, error.value.value) == ("training.checkpoint_address", address)


@pytest.mark.parametrize("is_known", [False, True])
def test_an_address_of_another_seed_is_told_with_the_address_and_nothing_of_it_is_taken(tiny_data, tmp_path, is_known):
    elsewhere = {"training.checkpoint_address": str(tmp_path / "elsewhere"), "training.max_steps": 2}
    trainer_of(tiny_data, tmp_path / "run", elsewhere).train()
    other = tmp_path / "other"
    if is_known:  # a run of its own, whose checkpoints were lost
        trainer_of(tiny_data, other, {"training.seed": 7, "training.max_steps": 2}).train()
        shutil.rmtree(other / "checkpoints")
        shutil.rmtree(other / "best", ignore_errors=True)
    with pytest.raises(UserError, match=r"another (run and )?seed: .*training\.seed is 42 there, 7 here") as refused:
        trainer_of(tiny_data, other, {**elsewhere, "training.seed": 7}).train()
    assert refused.value.option == "training.checkpoint_address"
    assert not list(other.glob("*/step-*"))


def test_address_of_a_run_on_other_data_is_refused(tiny_data, tmp_path):
    other = dataclasses.replace(preset("tiny", num_users=40, num_items=60), num_topics=1, max_length=24, seed=7)
    generate(other, tmp_path / "data" / "sequences")
    elsewhere = {"training.checkpoint_address": str(tmp_path / "there"), "training.max_steps": 2}
    trainer_of(tiny_data, tmp_path / "one", elsewhere).train()
    copied = contents_of(tmp_path / "there")
    with pytest.raises(UserError, match="is not the data that this run was trained on") as refused:
        trainer_of(tmp_path / "data", tmp_path / "two", elsewhere).train()
    assert str(tmp_path / "there" / "card.json") in refused.value.problem
    assert contents_of(tmp_path / "there") == copied
    assert not list((tmp_path / "two").rglob("step-*"))
    trainer_of(tiny_data, tmp_path / "two", elsewhere).train()


def contents_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def truncate_all(folder: Path, name: str) -> None:
    files = list(folder.rglob(name))
    assert len(files) > 1
    for file in files:
        file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("name", ["state.json", "manifest.json"])
@pytest.mark.parametrize("is_empty", [True, False])
def test_damaged_copies_end_the_run_and_are_kept(tiny_data, tmp_path, name, is_empty):
    """In an empty folder nothing can be restored; in another one it is not known whose copies would be replaced."""
    there = tmp_path / "there"
    elsewhere = {"training.checkpoint_address": str(there), "training.max_steps": 4}
    trainer_of(tiny_data, tmp_path / "one", elsewhere).train()
    truncate_all(there, name)
    copied = contents_of(there)
    if not is_empty:
        trainer_of(tiny_data, tmp_path / "two", {"training.max_steps": 2}).train()
    with pytest.raises(CorruptFileError, match="none of the checkpoints there is whole") as refused:
        trainer_of(tiny_data, tmp_path / "two", elsewhere).train()
    assert refused.value.option == "training.checkpoint_address"
    assert name.removesuffix(".json") in refused.value.problem
    assert contents_of(there) == copied


def test_damaged_copies_of_the_run_itself_are_replaced(tiny_data, tmp_path):
    there = tmp_path / "there"
    elsewhere = {"training.checkpoint_address": str(there), "training.max_steps": 4}
    trainer_of(tiny_data, tmp_path / "run", elsewhere).train()
    truncate_all(there, "state.json")
    trainer_of(tiny_data, tmp_path / "run", {**elsewhere, "training.max_steps": 6}).train()
    assert CheckpointManager(there / "checkpoints").state(6) is not None


def test_storage_that_cannot_be_read_ends_the_run(tiny_data, tmp_path, monkeypatch):
    monkeypatch.setattr("nestrec.artifacts.storage.RETRY_AFTER_S", ())
    there = tmp_path / "there"
    elsewhere = {"training.checkpoint_address": str(there), "training.max_steps": 4}
    trainer_of(tiny_data, tmp_path / "one", elsewhere).train()
    copied = contents_of(there)
    for file in (there / "checkpoints").rglob("state.json"):
        file.unlink()
        file.symlink_to(file.name)  # too many levels of links
    with pytest.raises(UserError, match=r"cannot be read: OSError: .*Too many levels"):
        trainer_of(tiny_data, tmp_path / "two", elsewhere).train()
    left = contents_of(there)
    assert left == {name: content for name, content in copied.items() if name in left}
    assert not list((tmp_path / "two").rglob("step-*"))
