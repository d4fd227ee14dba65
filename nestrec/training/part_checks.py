"""A run that has nothing to train on or to measure itself by, or asks for what cannot be combined, is refused before it
begins."""

import numpy as np
from numpy.typing import NDArray

from nestrec.base.config import leaves
from nestrec.base.errors import UserError
from nestrec.data.samples.split import Part
from nestrec.distributed import Topology
from nestrec.pipeline.arguments import MOST_EMPTY, check_cut
from nestrec.pipeline.clustering import MAX_MICRO_BATCHES
from nestrec.tasks.task import Task
from nestrec.training.config import RunConfig


def check_parts(cfg: RunConfig, task: Task) -> None:
    """Raise a UserError where the training part is empty, or the validation part although it is to be measured."""
    if len(task.assembler.tokens) == 0:
        raise UserError(
            "holds nothing to train on", field="data.folder", value=cfg.data.folder, remedy=task.remedy_if_empty
        )
    if validates(cfg) and task.num_held_out("valid") == 0:
        check_holds_out(cfg, "valid")
        raise UserError(
            "holds nothing to validate on",
            field="data.folder",
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
            field="task.split.kind",
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
                field=f"task.{name}",
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
            field="batch.micro_batches",
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
        raise UserError(problem, field="ranks.dense", value="fsdp", remedy="set ranks.dense=replicated")
