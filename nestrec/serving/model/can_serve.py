"""What can be served: what a task and its backbone say of themselves. docs/serving.md shows the same as a table."""

from nestrec.base.errors import UserError
from nestrec.models.backbones import cached_forward_of
from nestrec.serving.model.serving_form import serving_form_of
from nestrec.tasks.spec import TaskConfigBase


def check_served(task: TaskConfigBase) -> None:
    """Raise a `UserError` with the reason where models of a task cannot be served."""
    cached_forward_of(serving_form_of(task).encoder(task))


def why_not_served(task: TaskConfigBase) -> str | None:
    """The reason why models of a task cannot be served; none where they can."""
    try:
        check_served(task)
    except UserError as error:
        return error.problem
    return None
