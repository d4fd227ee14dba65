"""Options that a run would not look at are refused before it begins: whoever gave them expects something of them."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from nestrec.base.config import leaves
from nestrec.base.errors import Mistakes, UserError
from nestrec.data.batches import Assembler
from nestrec.data.samples.windows import WindowsConfig
from nestrec.embedding.replica_sync import ReplicaSyncConfig
from nestrec.embedding.row_optimizer import RowOptimizerConfig
from nestrec.models.backbones import backbone_of
from nestrec.tasks.task import Task
from nestrec.training.config import RunConfig


def check_options_are_used(cfg: RunConfig, task: Task) -> None:
    """Raise a UserError that names every option which is given and would be ignored. What is as by default passes."""
    mistakes = Mistakes()
    for path, optimizer in _row_optimizers(cfg.task, "task"):
        with mistakes.noted():
            optimizer.check_is_read(path)
    with mistakes.noted():
        _check_clustering(cfg, task)
    for name, value in leaves(cfg.windows).items():
        with mistakes.noted():
            if cfg.batch.order == "shuffled" and value != getattr(WindowsConfig(), name):
                raise UserError(
                    "samples are shuffled, and there are no windows",
                    field=f"windows.{name}",
                    value=value,
                    remedy="give --batch.order chronological too, or leave it out",
                )
    with mistakes.noted():
        if cfg.batch.order == "chronological" and cfg.batch.shuffle_block is not None:
            raise UserError(
                "nothing is shuffled in the order of time",
                field="batch.shuffle_block",
                value=cfg.batch.shuffle_block,
                remedy="leave it out, or take --batch.order shuffled",
            )
    with mistakes.noted():
        _check_precision(cfg)
    for name in ("mode", "every", "state_every"):
        with mistakes.noted():
            _check_replica_sync(cfg, name)
    mistakes.raise_all()


def _check_clustering(cfg: RunConfig, task: Task) -> None:
    name = cfg.pipeline.clustering
    if name is not None and cfg.batch.micro_batches == 1:
        raise UserError(
            "there is one micro-batch, which holds all samples of its rank",
            field="pipeline.clustering",
            value=name,
            remedy="give batch.micro_batches too, or leave it out",
        )
    if name is not None and type(task.assembler).sample_keys is Assembler.sample_keys:
        raise UserError(
            "the task does not tell which keys its samples look up",
            field="pipeline.clustering",
            value=name,
            remedy="leave it out, or define `sample_keys` of the task's assembler",
        )


def _check_precision(cfg: RunConfig) -> None:
    encoder = getattr(cfg.task, "encoder", None)
    if cfg.training.precision == "fp8" and (encoder is None or not backbone_of(encoder).has_fp8):
        raise UserError(
            f"{'the task' if encoder is None else encoder.kind} has no products of eight bits",
            field="training.precision",
            value="fp8",
            remedy="take bf16, or an encoder that has them: hstu, fuxi",
        )


def _check_replica_sync(cfg: RunConfig, name: str) -> None:
    sync, default = cfg.replica_sync, ReplicaSyncConfig()
    value = getattr(sync, name)
    if value == getattr(default, name):
        return
    if cfg.ranks.replicas == 1:
        raise UserError(
            "there is one group of ranks, and one copy of each row",
            field=f"replica_sync.{name}",
            value=value,
            remedy="give ranks.replicas too, or leave it out",
        )
    if name != "mode" and sync.mode == "gradients":
        raise UserError(
            "gradients are summed in every step",
            field=f"replica_sync.{name}",
            value=value,
            remedy="set replica_sync.mode=weights, or leave it out",
        )


def _row_optimizers(node: Any, path: str) -> Iterator[tuple[str, RowOptimizerConfig]]:
    """Those of a task's config, with their dotted names."""
    if isinstance(node, RowOptimizerConfig):
        yield path, node
    elif dataclasses.is_dataclass(node):
        for field in dataclasses.fields(node):
            yield from _row_optimizers(getattr(node, field.name), f"{path}.{field.name}")
