"""What a task says of itself: the seam through which things to learn of other packages join in.

    CHURN = TaskSpec(config=ChurnTaskConfig, make=ChurnTask)

Its config is a `@config` class whose field `kind` is the name of the task. `make` gives a `Task`: its tables, samples,
model, loss and measurements. Everything else has an answer that serves most tasks.
"""

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from nestrec.data.dataset import Dataset
from nestrec.tasks.task import Task


class TaskConfigBase(Protocol):
    """What the config of every task has."""

    @property
    def kind(self) -> str:
        """the task"""


class MakeTask(Protocol):
    """Puts a task together, on a dataset that fits it; a UserError where it does not."""

    def __call__(self, cfg: Any, dataset: Dataset, *, seed: int, dtype: Literal["float32", "float64"]) -> Task: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """The spec of a task. What it leaves at none it cannot answer, and who needs the answer says so."""

    config: type
    """its `@config` class"""
    make: MakeTask
    """the class of the task, or a function that makes it"""
    store_field: str | None = None
    """field of the config, a `StoreConfig`, that says where its largest table lives, which plans leave there where it
    is given"""
    serving: Any = None
    """a `nestrec.serving.model.serving_form.ServingForm`, or `module:attribute` of it; none: such a model cannot be
    exported"""
