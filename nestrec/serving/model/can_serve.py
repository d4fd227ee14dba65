"""What can be served today. docs/serving.md shows the same as a table."""

from typing import Any

from nestrec.base.errors import UserError
from nestrec.models.hstu import HSTUConfig
from nestrec.tasks.rows import RowsTaskConfig

_NO_PREFIX = "has no pass over a kept prefix, which is how the server computes candidates"
_NO_HISTORY = "scores single rows, and the server knows its users by histories"


def why_not_served(task: Any) -> str | None:
    """The reason why models of a task cannot be served; none where they can."""
    if isinstance(task, RowsTaskConfig):
        return _NO_HISTORY
    return None if isinstance(task.encoder, HSTUConfig) else _NO_PREFIX


def check_served(task: Any) -> None:
    """Raise a `UserError` with the reason where models of a task cannot be served."""
    if (reason := why_not_served(task)) is not None:
        remedy = "train one with HSTU (encoder kind hstu); docs/serving.md lists what can be served"
        raise UserError(
            f"cannot be served: it {reason}", field="task.encoder.kind", value=task.encoder.kind, remedy=remedy
        )
