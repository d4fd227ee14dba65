"""Task plugins: their parts and losses are validated before the first step."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from nestrec.base.config import config
from nestrec.base.errors import UserError
from nestrec.data.dataset import Dataset
from nestrec.distributed import Topology
from nestrec.tasks.retrieval_task import RetrievalTask, RetrievalTaskConfig
from nestrec.tasks.task import Task, TaskSpec, make_loss_compute
from nestrec.tasks.task_registry import TASKS, make_task, task_spec
from nestrec.training.trainer import Trainer
from support.tiny_runs import config_of, make_datasets


@config
class MineConfig(RetrievalTaskConfig):
    kind: Literal["mine"] = "mine"  # type: ignore[assignment]
    """Kind of the plugin task."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_datasets(folder)
    return folder


def config_with_task(monkeypatch: pytest.MonkeyPatch, make: Any, data: Path) -> Any:
    """Registers `make` as a task of another package, and returns the config of a run of it."""
    monkeypatch.setitem(TASKS._loaded, "mine", TaskSpec(config=MineConfig, make=make))
    monkeypatch.setitem(TASKS._external, "mine", None)  # type: ignore[arg-type]
    monkeypatch.setattr(TASKS, "package_of", lambda name: "theirs")
    cfg = config_of("hstu", data, {"training.max_steps": 1, "training.eval_every_epochs": 0})
    fields = {name: getattr(cfg.task, name) for name in RetrievalTaskConfig.__slots__ if name != "kind"}
    return replace(cfg, task=MineConfig(**fields))


def with_loss(change: Any) -> type[RetrievalTask]:
    class CustomTask(RetrievalTask):
        def loss(self, batch: Any, rows: Any, index: Any) -> Any:
            return change(super().loss(batch, rows, index), batch)

    return CustomTask


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda loss, batch: loss / len(batch.sample_ids), "for 4 samples, the mean of their losses"),
        (lambda loss, batch: loss / batch.num_tokens, "for 4 samples, the mean of their losses"),
        (lambda loss, batch: loss.expand(2), r"returns torch.float32 of shape \(2,\), but it must be a scalar"),
        (lambda loss, batch: loss.item(), "returns float, but it must be a tensor"),
        (lambda loss, batch: loss.detach(), "returns a scalar without a gradient"),
    ],
)
def test_plugin_task_loss_that_is_not_a_sum_is_rejected(
    monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path, change: Any, message: str
) -> None:
    trainer = Trainer(config_with_task(monkeypatch, with_loss(change), data), tmp_path / "run", Topology.single())
    with pytest.raises(UserError, match=message) as raised:
        trainer.train()
    assert (raised.value.option, raised.value.value) == ("nestrec.tasks: mine", "loss")
    assert not (tmp_path / "run" / "config.json").exists()


def test_plugin_task_loss_check_does_not_change_training(
    monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path
) -> None:
    digests = []
    for name in ("checked", "unchecked"):
        cfg = config_with_task(monkeypatch, with_loss(lambda loss, batch: 2 * loss), data)
        if name == "unchecked":
            monkeypatch.setattr("nestrec.training.trainer.check_loss_is_additive", lambda *_: None)
        trainer = Trainer(cfg, tmp_path / name, Topology.single())
        trainer.train()
        digests.append([p.detach().clone() for p in trainer.session.task.model.parameters()])
        trainer.close()
    assert all((one == other).all() for one, other in zip(*digests, strict=True))


def task_without(name: str) -> Any:
    def make(*args: Any, **named: Any) -> RetrievalTask:
        task = RetrievalTask(*args, **named)
        setattr(task, name, None)
        return task

    return make


class IncompleteTask(Task):
    def __init__(self, cfg: Any, dataset: Dataset, *, seed: int, dtype: str) -> None: ...


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda cfg, dataset, *, seed, dtype: 3, "its `make` returns 3, which is not a nestrec.tasks.task.Task"),
        (task_without("model"), "a task whose `model` is None, but it must be a Module"),
        (task_without("collator"), "a task whose `collator` is None"),
        (IncompleteTask, "IncompleteTask'> does not implement evaluate and loss and num_held_out"),
    ],
)
def test_plugin_task_with_missing_parts_is_rejected(
    monkeypatch: pytest.MonkeyPatch, data: Path, make: Any, message: str
) -> None:
    cfg = config_with_task(monkeypatch, make, data)
    with pytest.raises(UserError, match=message) as raised:
        make_task(cfg.task, Dataset.open(cfg.data.folder), seed=1, dtype="float32")
    assert "mine" in str(raised.value)


def test_task_kind_unknown_is_rejected_by_option() -> None:
    cfg: Any = SimpleNamespace(kind="retreival")
    with pytest.raises(UserError, match="retreival") as raised:
        task_spec(cfg)
    assert raised.value.option == "task.kind"


def test_loss_compute_uses_the_precision_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", products.append)
    task: Any = SimpleNamespace(loss=None, couples_samples="batch", reads_stored_rows=False)
    computes = [make_loss_compute(task, torch.device("cuda"), precision) for precision in ("fp32", "tf32", "bf16")]
    assert [compute._half for compute in computes] == [False, False, True]
    assert products == ["highest", "high", "high"]
    assert {compute.couples_samples for compute in computes} == {"batch"}
