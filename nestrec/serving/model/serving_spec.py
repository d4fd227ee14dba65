"""Serving spec of a task: how models of the task are exported and served. It is part of the `TaskSpec` of a plugin.

    serving = ServingSpec(role="retrieval", model=..., make_adapter=..., max_history_events=...)
    TASK = TaskSpec(config=MyTaskConfig, make=MyTask, serving=serving)

A task whose model is a `RetrievalModel` and whose config has a `history` can use the built-in `serving="retrieval"`;
a task with a `RankingModel` and `inputs` can use `serving="ranking"`.
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
    """Backbone config of a model without a backbone: it reads no history and has no KV cache."""

    dim: int
    """Embedding dimension of the model."""
    kind: str = "none"
    max_length: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSpec:
    """Description of how models of a task are exported and served in a retrieval-ranking cascade.

    The embedding tables of a servable are `items` and one table per feature column. Callables that take a `task`
    receive the config of the task.
    """

    role: Literal["retrieval", "ranking"]
    """Stage of the cascade: `retrieval` finds the best items of the catalog, `ranking` scores given candidates."""
    model: Callable[[Any], nn.Module]
    """Maps a `ServableSpec` to a model with arbitrary weights, which the loader overwrites. The attribute `encoder` of
    the model must be created by the backbone."""
    make_adapter: Callable[[Any, int], Any]
    """Maps a servable and the stride of a full history in events to a `ModelAdapter`."""
    max_history_events: Callable[[Any], int]
    """Maps the task's config to the maximum number of history events."""
    slide_events: Callable[[Any], int | None] = lambda task: None
    """Maps the task's config to the stride of a full history: the number of oldest events that are dropped at once when
    the maximum is exceeded. None means an eighth of the maximum."""
    encoder: Callable[[Any], BackboneConfig] = attrgetter("encoder")
    """Maps the task's config to the config of the backbone, or to a `NoBackboneConfig` for a model without one."""
    columns: Callable[[Any, DatasetCard], tuple[Column, ...]] = lambda task, card: ()
    """Maps the task's config and the dataset card to the feature columns that the model reads in addition to the item
    id."""
    index: Callable[[Any, torch.Tensor], torch.Tensor] | None = None
    """Maps the model and the rows of the item table to the vectors of the retrieval index; None for ranking models."""
    item_content: Callable[[Any, EmbeddingEngine, NDArray[np.int64]], torch.Tensor] | None = None
    """Maps (task, engine, items) to a tensor of shape (items, model width) with the item vectors that the model reads,
    including the features of the items; an export stores them instead of the rows of the item table. None stores the
    rows of the item table."""
    stores_item_parts: Callable[[Any], bool] = lambda task: False
    """Maps the task's config to whether the model reads the features of an item separately; if so, an exported item row
    is the concatenation of its vectors, the vector of the item id first."""
    num_prefix: Callable[[Any], int] = lambda task: 0
    """Maps the task's config to the number of user features that are tokens before the history: all or none."""
    reads_actions: bool = False
    """Whether scores depend on the actions of events."""
    needs_event: bool = False
    """Whether the model cannot score a user without events."""
    reads_items: bool = True
    """Whether events and candidates are items of a catalog. If False, the model reads no history, and candidates are
    described by the features in the request."""
    reads_candidate_features: bool = True
    """Whether scores depend on features of candidates in the request, such as the context in which they are shown."""
    export: Callable[[Any, int], Any] | None = None
    """Maps (session, step) to the `Servable` of a run, for models without an item table; None uses the common export
    of models with an item table."""


class TrainedRun(Protocol):
    """The part of a training session that an export reads (a protocol, since serving does not import training)."""

    @property
    def cfg(self) -> Any: ...

    @property
    def engine(self) -> EmbeddingEngine: ...

    @property
    def dataset(self) -> Dataset: ...

    @property
    def task(self) -> Task: ...


BUILTIN_SERVING_SPECS = {
    "retrieval": "nestrec.serving.model.retrieval_adapter:SERVING",
    "ranking": "nestrec.serving.model.ranking_adapter:SERVING",
    "rows": "nestrec.serving.model.ctr_adapter:SERVING",
}
"""Import paths of the built-in serving specs, by the name that a `TaskSpec` uses."""


def serving_spec_of(task: TaskConfigBase) -> ServingSpec:
    """Return the serving spec of a task.

    Raises:
        UserError: The task does not declare one, so its models cannot be served.
    """
    if (serving := task_spec(task).serving) is None:
        problem = "cannot be served: its TaskSpec does not declare a ServingSpec"
        raise TASKS.missing_field_error(
            task.kind, "serving", problem, hint="; docs/serving.md lists what can be served"
        )
    serving = BUILTIN_SERVING_SPECS.get(serving, serving) if isinstance(serving, str) else serving
    spec: ServingSpec = TASKS.resolve_field(task.kind, "serving", serving, of=ServingSpec)
    return spec


def check_publishable(task: TaskConfigBase) -> None:
    """Raise a `UserError` if models of a task cannot be published as versions that servers follow."""
    if serving_spec_of(task).export is not None:
        remedy = "export the run and swap models: nestrec export, nestrec swap"
        raise UserError(
            "cannot be published: published versions require an item table",
            option="task.kind",
            value=task.kind,
            remedy=remedy,
        )


def unsupported_reason(task: TaskConfigBase) -> str | None:
    """Return the reason why models of a task cannot be served, or None if they can (see docs/serving.md)."""
    try:
        serving_spec_of(task)
    except UserError as error:
        return error.problem
    return None
