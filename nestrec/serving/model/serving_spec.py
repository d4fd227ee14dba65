"""In which form a task's models are served: the part of a task's spec that serving reads.

    TASK = TaskSpec(config=MyTaskConfig, make=MyTask, serving=ServingSpec(role="retrieval", model=..., form=..., ...))

A task whose model is a `RetrievalModel` and whose config has a `history` may use the form `serving="retrieval"`.
Likewise `serving="ranking"` for a `RankingModel` with `inputs`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from nestrec.base.errors import UserError
from nestrec.data.dataset import Dataset
from nestrec.data.dataset_card import DatasetCard
from nestrec.data.samples.feature_inputs import Column
from nestrec.embedding import EmbeddingEngine
from nestrec.models.backbone_spec import BackboneConfig
from nestrec.tasks.task import Task, TaskConfigBase
from nestrec.tasks.task_registry import TASKS, task_spec


@dataclass(frozen=True, slots=True)
class NoBackboneConfig:
    """In the place of a backbone's config: the model reads no history, and nothing of it is kept."""

    dim: int
    """elements of what it looks up"""
    kind: str = "none"
    max_length: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSpec:
    """How models of a task become part of a cascade. Their tables are `items` and one for each column."""

    role: Literal["retrieval", "ranking"]
    """finds the best of the catalogue, or orders candidates"""
    model: Callable[[Any], nn.Module]
    """the model of a `ServableSpec`, with any weights; its attribute `encoder` is made by the backbone"""
    form: Callable[[Any, int], Any]
    """(servable, events by which a full history slides) to a `nestrec.serving.model.model_adapter.ModelAdapter`"""
    longest_history: Callable[[Any], int]
    """events, of the task's config"""
    slide_events: Callable[[Any], int | None] = lambda task: None
    """maps the task's config to the number of events by which a full history slides; none: an eighth of the longest"""
    encoder: Callable[[Any], BackboneConfig] = attrgetter("encoder")
    """the backbone's config in the task's; a `NoBackboneConfig` where there is none"""
    columns: Callable[[Any, DatasetCard], tuple[Column, ...]] = lambda task, card: ()
    """categories beside the item that the model reads, of the task's config and the dataset's card"""
    index: Callable[[Any, torch.Tensor], torch.Tensor] | None = None
    """(model, rows of the item table) to the vectors in which the best of the catalogue are looked for; none where
    nothing is retrieved"""
    item_content: Callable[[Any, EmbeddingEngine, NDArray[np.int64]], torch.Tensor] | None = None
    """(task, engine, items) to (items, model width): what the model reads of an item, its own features included, which
    an export keeps in the place of the item table's rows; none: those rows"""
    keeps_item_parts: Callable[[Any], bool] = lambda task: False
    """of the task's config: it reads the features of an item apart, so what an export keeps of an item is one vector
    after the other, of its id first"""
    num_prefix: Callable[[Any], int] = lambda task: 0
    """of the task's config: features of users that are tokens before a history, all of them or none"""
    reads_actions: bool = False
    """scores depend on what the user did at events"""
    needs_event: bool = False
    """it knows a user by nothing but events"""
    reads_items: bool = True
    """events and candidates are items of a catalogue; without one a history is not read, and candidates are what a
    request tells of them"""
    reads_candidate_features: bool = True
    """scores depend on what a request tells of candidates, such as the context they would be shown in"""
    exported: Callable[[Any, int], Any] | None = None
    """(session, step) to the `Servable` of a run, of models that have no table of items; none: that of all others"""


class TrainedRun(Protocol):
    """The part of a training session that an export reads."""

    @property
    def cfg(self) -> Any: ...

    @property
    def engine(self) -> EmbeddingEngine: ...

    @property
    def dataset(self) -> Dataset: ...

    @property
    def task(self) -> Task: ...


SERVING_FORMS = {
    "retrieval": "nestrec.serving.model.retrieval_adapter:SERVING",
    "ranking": "nestrec.serving.model.ranking_adapter:SERVING",
    "rows": "nestrec.serving.model.ctr_adapter:SERVING",
}
"""Forms of the built-in tasks, by the names that their specs use."""


def serving_form_of(task: TaskConfigBase) -> ServingSpec:
    """In which form the models of a task are served; a UserError where there is none."""
    if (serving := task_spec(task).serving) is None:
        problem = "cannot be served: it has no form in which the server, which knows users by histories, asks a model"
        raise TASKS.unanswered(task.kind, "serving", problem, see="; docs/serving.md lists what can be served")
    serving = SERVING_FORMS.get(serving, serving) if isinstance(serving, str) else serving
    found: ServingSpec = TASKS.resolved(task.kind, "serving", serving, of=ServingSpec)
    return found


def check_published(task: TaskConfigBase) -> None:
    """Raise a `UserError` where models of a task have no versions that servers follow."""
    if serving_form_of(task).exported is not None:
        remedy = "export the run and swap models: nestrec export, nestrec swap"
        raise UserError(
            "cannot be published: versions are told by rows of items", option="task.kind", value=task.kind, remedy=remedy
        )


def why_not_served(task: TaskConfigBase) -> str | None:
    """The reason why models of a task cannot be served; none where they can. docs/serving.md shows it as a table."""
    try:
        serving_form_of(task)
    except UserError as error:
        return error.problem
    return None
