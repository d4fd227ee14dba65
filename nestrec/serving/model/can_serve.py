"""What can be served: what a task says of itself. docs/serving.md shows the same as a table."""

from nestrec.base.errors import UserError
from nestrec.serving.model.serving_form import serving_form_of
from nestrec.tasks.spec import TaskConfigBase


def check_served(task: TaskConfigBase) -> None:
    """Raise a `UserError` with the reason where models of a task cannot be served."""
    serving_form_of(task)


def check_published(task: TaskConfigBase) -> None:
    """Raise a `UserError` where models of a task have no versions that servers follow."""
    if serving_form_of(task).exported is not None:
        remedy = "export the run and swap models: nestrec export, nestrec swap"
        raise UserError(
            "cannot be published: versions are told by rows of items", field="task.kind", value=task.kind, remedy=remedy
        )


def why_not_served(task: TaskConfigBase) -> str | None:
    """The reason why models of a task cannot be served; none where they can."""
    try:
        check_served(task)
    except UserError as error:
        return error.problem
    return None
