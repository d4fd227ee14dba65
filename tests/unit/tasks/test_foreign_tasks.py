"""Tasks of other packages: parts and losses are looked at before the first step."""

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
from nestrec.tasks.task import Task, TaskSpec, compute_of
from nestrec.tasks.task_registry import TASKS, make_task, task_spec
from nestrec.training.trainer import Trainer
from support.tiny_runs import config_of, make_datasets


@config
class MineConfig(RetrievalTaskConfig):
    kind: Literal["mine"] = "mine"  # type: ignore[assignment]
    """a task of another package"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_datasets(folder)
    return folder


def given(monkeypatch: pytest.MonkeyPatch, make: Any, data: Path) -> Any:
    """The config of a run of a task that another package brings."""
    monkeypatch.setitem(TASKS._loaded, "mine", TaskSpec(config=MineConfig, make=make))
    monkeypatch.setitem(TASKS._foreign, "mine", None)  # type: ignore[arg-type]
    monkeypatch.setattr(TASKS, "package_of", lambda name: "theirs")
    cfg = config_of("hstu", data, {"training.max_steps": 1, "training.evaluate_every_epochs": 0})
    fields = {name: getattr(cfg.task, name) for name in RetrievalTaskConfig.__slots__ if name != "kind"}
    return replace(cfg, task=MineConfig(**fields))


def with_loss(change: Any) -> type[RetrievalTask]:
    class Mine(RetrievalTask):
        def loss(self, batch: Any, rows: Any, index: Any) -> Any:
            return change(super().loss(batch, rows, index), batch)

    return Mine


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda loss, batch: loss / len(batch.sample_ids), "of 4 samples, the mean of what it gives of each"),
        (lambda loss, batch: loss / batch.num_tokens, "of 4 samples, the mean of what it gives of each"),
        (lambda loss, batch: loss.expand(2), r"gives torch.float32 of \(2,\) and not one number"),
        (lambda loss, batch: loss.item(), "gives float and no tensor"),
        (lambda loss, batch: loss.detach(), "gives a number without a gradient"),
    ],
)
def test_a_loss_that_is_no_sum_is_named_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path, change: Any, said: str
) -> None:
    trainer = Trainer(given(monkeypatch, with_loss(change), data), tmp_path / "run", Topology.single())
    with pytest.raises(UserError, match=said) as refused:
        trainer.train()
    assert (refused.value.option, refused.value.value) == ("nestrec.tasks: mine", "loss")
    assert not (tmp_path / "run" / "config.json").exists()


def test_the_look_at_a_loss_changes_nothing(monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path) -> None:
    digests = []
    for name in ("looked_at", "ours"):
        cfg = given(monkeypatch, with_loss(lambda loss, batch: 2 * loss), data)
        if name == "ours":
            monkeypatch.setattr("nestrec.training.trainer.check_loss_is_sum", lambda *_: None)
        trainer = Trainer(cfg, tmp_path / name, Topology.single())
        trainer.train()
        digests.append([p.detach().clone() for p in trainer.session.task.model.parameters()])
        trainer.close()
    assert all((one == other).all() for one, other in zip(*digests, strict=True))


def without(name: str) -> Any:
    def make(*args: Any, **named: Any) -> RetrievalTask:
        task = RetrievalTask(*args, **named)
        setattr(task, name, None)
        return task

    return make


class HalfATask(Task):
    def __init__(self, cfg: Any, dataset: Dataset, *, seed: int, dtype: str) -> None: ...


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda cfg, dataset, *, seed, dtype: 3, "its `make` gives 3 and no nestrec.tasks.task.Task"),
        (without("model"), "a task with None as `model`, where a Module is asked for"),
        (without("assembler"), "a task with None as `assembler`"),
        (HalfATask, "HalfATask'> has no evaluate and no loss and no num_held_out"),
    ],
)
def test_a_task_without_a_part_is_named_when_it_is_made(
    monkeypatch: pytest.MonkeyPatch, data: Path, make: Any, said: str
) -> None:
    cfg = given(monkeypatch, make, data)
    with pytest.raises(UserError, match=said) as refused:
        make_task(cfg.task, Dataset.open(cfg.data.folder), seed=1, dtype="float32")
    assert "mine" in str(refused.value)


def test_unknown_task_is_refused_by_its_field() -> None:
    cfg: Any = SimpleNamespace(kind="retreival")
    with pytest.raises(UserError, match="retreival") as refused:
        task_spec(cfg)
    assert refused.value.option == "task.kind"


def test_loss_is_computed_in_the_precision_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", products.append)
    task: Any = SimpleNamespace(loss=None, couples_samples="batch", reads_stored_rows=False)
    computes = [compute_of(task, torch.device("cuda"), precision) for precision in ("fp32", "tf32", "bf16")]
    assert [compute._half for compute in computes] == [False, False, True]
    assert products == ["highest", "high", "high"]
    assert {compute.couples_samples for compute in computes} == {"batch"}
