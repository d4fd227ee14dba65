"""Checks of a run's options before training begins.

Ranks that were started with different configurations say so at once, instead of training on something else each.

A run that has nothing to train on or to measure itself by, or asks for what cannot be combined, is refused before it
begins.

Options that a run would not look at are refused before it begins: whoever gave them expects something of them.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestrec.base.config import leaves
from nestrec.base.errors import ErrorCollector, UserError
from nestrec.data.batch_loader import Collator
from nestrec.data.samples.split import Part
from nestrec.data.samples.time_windows import WindowsConfig
from nestrec.distributed import Topology
from nestrec.distributed.collectives import all_gather_json
from nestrec.embedding.routing.replica_key_union import ReplicaSyncConfig
from nestrec.embedding.row_optimizer import RowOptimizerConfig
from nestrec.models.backbone_registry import backbone_of
from nestrec.pipeline.argument_checks import MOST_EMPTY, check_cut
from nestrec.pipeline.key_clustering import MAX_MICRO_BATCHES
from nestrec.tasks.task import Task
from nestrec.training.run_config import RunConfig


def agree_on_config(cfg: RunConfig, topology: Topology) -> None:
    """The same UserError on every rank, naming the first field that differs, unless all ranks were given the same."""
    first, *others = all_gather_json(topology.control, leaves(cfg))
    for rank, other in enumerate(others, start=1):
        for name in dict.fromkeys([*first, *other]):
            mine = first.get(name, "not there")
            theirs = other.get(name, "not there")
            if mine != theirs:
                raise UserError(
                    f"differs between ranks: rank {rank} has {theirs!r}",
                    option=name,
                    value=mine,
                    remedy="start every rank with the same command",
                )


def check_parts(cfg: RunConfig, task: Task) -> None:
    """Raise a UserError where the training part is empty, or the validation part although it is to be measured."""
    if len(task.assembler.tokens) == 0:
        raise UserError(
            "holds nothing to train on", option="data.folder", value=cfg.data.folder, remedy=task.remedy_if_empty
        )
    if validates(cfg) and task.num_held_out("valid") == 0:
        check_holds_out(cfg, "valid")
        raise UserError(
            "holds nothing to validate on",
            option="data.folder",
            value=cfg.data.folder,
            remedy=f"{task.remedy_if_empty}, or set --training.evaluate_every_epochs 0",
        )


def validates(cfg: RunConfig) -> bool:
    """Returns whether a run is to measure itself on the validation part after its epochs."""
    split = getattr(cfg.task, "split", None)
    holds_out = getattr(split, "kind", None) != "none"
    return holds_out and not cfg.training.train_only and cfg.training.evaluate_every_epochs > 0


def check_holds_out(cfg: RunConfig, part: Part) -> None:
    """Raises a `UserError` if the options, and not the log, are the reason why a part is empty."""
    fields = leaves(cfg.task)
    if fields.get("split.kind") == "none":
        raise UserError(
            f"holds no events out, so there is no {part} part",
            option="task.split.kind",
            value="none",
            remedy="measure a run with another split, such as the one whose options this run has",
        )
    if fields.get("split.kind") == "leave_one_out" or fields.get(f"split.{part}_from") is not None:
        return  # shares are not read
    for name, value in fields.items():
        if name.endswith(f"{part}_share") and value == 0:
            all_train = "--task.split.kind none" if name.startswith("split.") else "--training.train_only true"
            raise UserError(
                f"holds out no events, so there is no {part} part",
                option=f"task.{name}",
                value=value,
                remedy=f"give a share above 0; or, to train on all events without measuring, give {all_train}",
            )


def check_micro_batches(cfg: RunConfig, tokens: NDArray[np.int64] | None = None) -> None:
    """Raise a UserError where some micro-batches would be empty on every rank, whatever the number of ranks.

    Empty ones on some ranks, or on all of many, are legal: every rank runs equally many exchanges, and a run may go on
    with other ranks. As many as `auto` may take are, too. tokens: of the samples; none where they are still to come.
    """
    wanted = cfg.batch.micro_batches
    if wanted == "auto" or wanted <= MOST_EMPTY:
        return
    most = cfg.batch.batch_samples or _most_samples(cfg.batch.batch_tokens or 1, tokens)
    check_cut(wanted, most, "the largest global batch", field="batch.micro_batches")
    if cfg.pipeline.clustering is not None and wanted > MAX_MICRO_BATCHES:
        raise UserError(
            "is more than clustering can tell apart",
            option="batch.micro_batches",
            value=wanted,
            remedy=f"give at most {MAX_MICRO_BATCHES}, or leave out pipeline.clustering",
        )


def _most_samples(batch_tokens: int, tokens: NDArray[np.int64] | None) -> int:
    """That a batch of so many tokens can hold, in any order of the samples."""
    if tokens is None:
        return batch_tokens
    return max(1, int(np.searchsorted(np.cumsum(np.sort(tokens)), batch_tokens, side="right")))


def check_dense(cfg: RunConfig, topology: Topology, *, follows: bool) -> None:
    """Raise a UserError where sharded layers cannot be had together with what else is asked for."""
    if cfg.ranks.dense == "replicated" or topology.world == 1:
        return
    problem = None
    if topology.device.type == "cuda" and cfg.pipeline.schedule != "serial":
        problem = "on GPUs its passes and the exchanges of this schedule would be issued by two threads"
    elif cfg.publish.address:
        problem = "a version is written from the whole model, which no rank holds (publish the run when it has ended)"
    elif topology.context.size > 1:
        problem = "has not been tried together with ranks.context, which exchanges inside its passes"
    elif follows:
        problem = "a run that follows its data makes its model anew"
    if problem is not None:
        raise UserError(problem, option="ranks.dense", value="fsdp", remedy="set ranks.dense=replicated")


def check_options_are_used(cfg: RunConfig, task: Task) -> None:
    """Raise a UserError that names every option which is given and would be ignored. What is as by default passes."""
    mistakes = ErrorCollector()
    for path, optimizer in _row_optimizers(cfg.task, "task"):
        with mistakes.collecting():
            optimizer.check_is_read(path)
    with mistakes.collecting():
        _check_clustering(cfg, task)
    for name, value in leaves(cfg.windows).items():
        if cfg.batch.order == "shuffled" and value != getattr(WindowsConfig(), name):
            mistakes.add(
                "samples are shuffled, and there are no windows",
                option=f"windows.{name}",
                value=value,
                remedy="give --batch.order chronological too, or leave it out",
            )
    if cfg.batch.order == "chronological" and cfg.batch.shuffle_block is not None:
        mistakes.add(
            "nothing is shuffled in the order of time",
            option="batch.shuffle_block",
            value=cfg.batch.shuffle_block,
            remedy="leave it out, or take --batch.order shuffled",
        )
    with mistakes.collecting():
        _check_precision(cfg)
    for name in ("mode", "every", "state_every"):
        with mistakes.collecting():
            _check_replica_sync(cfg, name)
    mistakes.raise_if_any()


def _check_clustering(cfg: RunConfig, task: Task) -> None:
    name = cfg.pipeline.clustering
    if name is not None and cfg.batch.micro_batches == 1:
        raise UserError(
            "there is one micro-batch, which holds all samples of its rank",
            option="pipeline.clustering",
            value=name,
            remedy="give batch.micro_batches too, or leave it out",
        )
    if name is not None and type(task.assembler).sample_keys is Collator.sample_keys:
        raise UserError(
            "the task does not tell which keys its samples look up",
            option="pipeline.clustering",
            value=name,
            remedy="leave it out, or define `sample_keys` of the task's assembler",
        )


def _check_precision(cfg: RunConfig) -> None:
    encoder = getattr(cfg.task, "encoder", None)
    if cfg.training.precision == "fp8" and (encoder is None or not backbone_of(encoder).has_fp8):
        raise UserError(
            f"{'the task' if encoder is None else encoder.kind} has no products of eight bits",
            option="training.precision",
            value="fp8",
            remedy="take bf16, or an encoder that has them: hstu, fuxi",
        )


def _check_replica_sync(cfg: RunConfig, name: str) -> None:
    sync = cfg.replica_sync
    default = ReplicaSyncConfig()
    value = getattr(sync, name)
    if value == getattr(default, name):
        return
    if cfg.ranks.replicas == 1:
        raise UserError(
            "there is one group of ranks, and one copy of each row",
            option=f"replica_sync.{name}",
            value=value,
            remedy="give ranks.replicas too, or leave it out",
        )
    if name != "mode" and sync.mode == "gradients":
        raise UserError(
            "gradients are summed in every step",
            option=f"replica_sync.{name}",
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
