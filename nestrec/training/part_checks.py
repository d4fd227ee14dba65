"""A run that has nothing to train on, or nothing to measure itself by, is refused before it begins."""

from nestrec.base.errors import UserError
from nestrec.tasks.task import Task
from nestrec.training.config import RunConfig


def check_parts(cfg: RunConfig, task: Task) -> None:
    """Raise a UserError where the training part is empty, or the validation part although it is to be measured."""
    if len(task.assembler.tokens) == 0:
        raise UserError(
            "holds nothing to train on", field="data.folder", value=cfg.data.folder, remedy=task.remedy_if_empty
        )
    if cfg.training.evaluate_every_epochs > 0 and task.num_held_out("valid") == 0:
        raise UserError(
            "holds nothing to validate on",
            field="data.folder",
            value=cfg.data.folder,
            remedy=f"{task.remedy_if_empty}, or set --training.evaluate_every_epochs 0",
        )
