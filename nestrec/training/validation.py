"""Validation of a run's options before training starts.

A run is rejected if its ranks have different configs, if the training or validation split is empty, if options cannot
be combined, or if an option is set that would be ignored.
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
from nestrec.models.backbone_registry import BACKBONES, backbone_of
from nestrec.pipeline.argument_checks import MAX_EMPTY_MICRO_BATCHES, check_micro_batches_have_samples
from nestrec.pipeline.key_clustering import MAX_MICRO_BATCHES
from nestrec.tasks.task import Task
from nestrec.training.run_config import RunConfig


def check_same_config_on_all_ranks(cfg: RunConfig, topology: Topology) -> None:
    """Raise the same UserError on all ranks if their configs differ; it names the first difference. Collective."""
    first, *others = all_gather_json(topology.control, leaves(cfg))
    for rank, other in enumerate(others, start=1):
        for name in dict.fromkeys([*first, *other]):
            value = first.get(name, "not set")
            other_value = other.get(name, "not set")
            if value != other_value:
                raise UserError(
                    f"must be equal on all ranks, but rank {rank} has {other_value!r}",
                    option=name,
                    value=value,
                    remedy="start every rank with the same command",
                )


def check_splits_not_empty(cfg: RunConfig, task: Task) -> None:
    """Raise a UserError if the training split is empty, or the validation split if validation is enabled."""
    if len(task.collator.tokens) == 0:
        raise UserError(
            "the dataset has no training samples",
            option="data.folder",
            value=cfg.data.folder,
            remedy=task.remedy_if_empty,
        )
    if has_validation(cfg) and task.num_held_out("valid") == 0:
        check_split_not_empty(cfg, "valid")
        raise UserError(
            "the dataset has no validation samples",
            option="data.folder",
            value=cfg.data.folder,
            remedy=f"{task.remedy_if_empty}, or set --training.eval_every_epochs 0",
        )


def has_validation(cfg: RunConfig) -> bool:
    """Return whether a run evaluates on the validation split during training."""
    split = getattr(cfg.task, "split", None)
    has_split = getattr(split, "kind", None) != "none"
    return has_split and not cfg.training.train_only and cfg.training.eval_every_epochs > 0


def check_split_not_empty(cfg: RunConfig, part: Part) -> None:
    """Raise a UserError if a split is empty because of the options, not because of the data."""
    fields = leaves(cfg.task)
    if fields.get("split.kind") == "none":
        raise UserError(
            f"no events are held out, so the {part} split is empty",
            option="task.split.kind",
            value="none",
            remedy="evaluate a run that was trained with another split",
        )
    if fields.get("split.kind") == "leave_one_out" or fields.get(f"split.{part}_from") is not None:
        return  # the fractions are not used
    for name, value in fields.items():
        if name.endswith(f"{part}_fraction") and value == 0:
            all_train = "--task.split.kind none" if "split.kind" in fields else "--training.train_only true"
            raise UserError(
                f"no events are held out, so the {part} split is empty",
                option=f"task.{name}",
                value=value,
                remedy=f"use a fraction above 0; or, to train on all events without evaluation, set {all_train}",
            )


def check_micro_batches(cfg: RunConfig, tokens: NDArray[np.int64] | None = None) -> None:
    """Raise a UserError if some micro-batches would be empty on a single rank.

    With several ranks empty micro-batches are allowed, because all ranks run the same number of exchanges and a run may
    resume on another number of ranks; so are up to `MAX_EMPTY_MICRO_BATCHES` micro-batches, which `auto` may choose.

    Args:
        cfg: Config of the run.
        tokens: Number of tokens of each sample; None if unknown (online training).
    """
    num_micro_batches = cfg.batch.num_micro_batches
    if num_micro_batches == "auto" or num_micro_batches <= MAX_EMPTY_MICRO_BATCHES:
        return
    max_samples = cfg.batch.batch_size or _max_samples(cfg.batch.batch_tokens or 1, tokens)
    check_micro_batches_have_samples(
        num_micro_batches, max_samples, "the largest global batch", field="batch.num_micro_batches"
    )
    if cfg.pipeline.clustering is not None and num_micro_batches > MAX_MICRO_BATCHES:
        raise UserError(
            f"must be at most {MAX_MICRO_BATCHES} with key clustering",
            option="batch.num_micro_batches",
            value=num_micro_batches,
            remedy="use fewer micro-batches, or remove pipeline.clustering",
        )


def _max_samples(batch_tokens: int, tokens: NDArray[np.int64] | None) -> int:
    """Return the maximum number of samples in a batch of `batch_tokens` tokens, in any order of the samples."""
    if tokens is None:
        return batch_tokens
    return max(1, int(np.searchsorted(np.cumsum(np.sort(tokens)), batch_tokens, side="right")))


def check_dense_sharding(cfg: RunConfig, topology: Topology, *, is_stream: bool) -> None:
    """Raise a UserError if fully sharded dense layers (FSDP) cannot be combined with other options."""
    if cfg.parallel.dense == "replicated" or topology.world == 1:
        return
    problem = None
    if topology.device.type == "cuda" and cfg.pipeline.schedule != "serial":
        problem = "on GPUs fsdp needs the serial schedule, because other schedules issue collectives from two threads"
    elif cfg.publish.address:
        problem = "cannot publish versions while training with fsdp, because no rank has the unsharded model"
    elif topology.context.size > 1:
        problem = "fsdp cannot be combined with parallel.context_parallel, whose passes contain collectives"
    elif is_stream:
        problem = "online training does not support fsdp, because it rebuilds the model for each dataset generation"
    if problem is not None:
        raise UserError(problem, option="parallel.dense", value="fsdp", remedy="set parallel.dense=replicated")


def check_no_unused_options(cfg: RunConfig, task: Task) -> None:
    """Raise a UserError that lists all options that are set (not the default) but would be ignored."""
    mistakes = ErrorCollector()
    for path, optimizer in _row_optimizers(cfg.task, "task"):
        with mistakes.collecting():
            optimizer.check_is_read(path)
    with mistakes.collecting():
        _check_clustering(cfg, task)
    for name, value in leaves(cfg.windows).items():
        if cfg.batch.order == "shuffled" and value != getattr(WindowsConfig(), name):
            mistakes.add(
                "the option has no effect, because samples are shuffled and there are no time windows",
                option=f"windows.{name}",
                value=value,
                remedy="set --batch.order chronological too, or remove it",
            )
    if cfg.batch.order == "chronological" and cfg.batch.shuffle_block_size is not None:
        mistakes.add(
            "the option has no effect, because samples in chronological order are not shuffled",
            option="batch.shuffle_block_size",
            value=cfg.batch.shuffle_block_size,
            remedy="remove it, or set --batch.order shuffled",
        )
    with mistakes.collecting():
        _check_precision(cfg)
    for name in ("mode", "every_steps", "state_every_averages"):
        with mistakes.collecting():
            _check_replica_sync(cfg, name)
    mistakes.raise_if_any()


def _check_clustering(cfg: RunConfig, task: Task) -> None:
    name = cfg.pipeline.clustering
    if name is not None and cfg.batch.num_micro_batches == 1:
        raise UserError(
            "the option has no effect, because there is only one micro-batch",
            option="pipeline.clustering",
            value=name,
            remedy="set batch.num_micro_batches too, or remove it",
        )
    if name is not None and type(task.collator).sample_keys is Collator.sample_keys:
        raise UserError(
            "the task does not provide the keys that its samples look up",
            option="pipeline.clustering",
            value=name,
            remedy="remove it, or implement `sample_keys` in the task's collator",
        )


def _check_precision(cfg: RunConfig) -> None:
    encoder = getattr(cfg.task, "encoder", None)
    if cfg.training.precision != "fp8":
        return
    is_supported = encoder is not None and encoder.kind in BACKBONES and backbone_of(encoder).has_fp8
    if not is_supported:
        raise UserError(
            f"{'the task' if encoder is None else encoder.kind} does not support 8-bit matrix products",
            option="training.precision",
            value="fp8",
            remedy="use bf16, or an encoder that supports them: hstu, fuxi",
        )


def _check_replica_sync(cfg: RunConfig, name: str) -> None:
    sync = cfg.replica_sync
    default = ReplicaSyncConfig()
    value = getattr(sync, name)
    if value == getattr(default, name):
        return
    if cfg.parallel.num_replicas == 1:
        raise UserError(
            "the option has no effect, because there is only one replica of each row",
            option=f"replica_sync.{name}",
            value=value,
            remedy="set parallel.num_replicas too, or remove it",
        )
    if name != "mode" and sync.mode == "gradients":
        raise UserError(
            "the option has no effect, because gradients are summed in every step",
            option=f"replica_sync.{name}",
            value=value,
            remedy="set replica_sync.mode=weights, or remove it",
        )


def _row_optimizers(node: Any, path: str) -> Iterator[tuple[str, RowOptimizerConfig]]:
    """Yield the row optimizers of a task's config with their dotted names."""
    if isinstance(node, RowOptimizerConfig):
        yield path, node
    elif dataclasses.is_dataclass(node):
        for field in dataclasses.fields(node):
            yield from _row_optimizers(getattr(node, field.name), f"{path}.{field.name}")
