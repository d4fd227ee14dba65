"""Adapter of CTR models (DLRM), which are trained on labeled rows: each candidate is scored by its own features.

These models have no catalog and read no history: a request contains arbitrary candidate names, with numbers and
categories per candidate, or for all candidates in `context`. There is no prefill and no KV cache.

Legend: C candidates, F categories, N numbers, D vector width.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.errors import UserError, require
from nestrec.data.dataset_schema import EVENT_PREFIX
from nestrec.data.formats.criteo import CATEGORY_NAMES, DENSE_NAMES, HASH_KEY
from nestrec.embedding import TableConfig
from nestrec.models.dlrm import DLRM
from nestrec.models.encoder_parts import FeatureProjections
from nestrec.ops.embedding.stochastic_rounding import to_float32
from nestrec.serving.model.item_id_map import KeyedTable, KeyedTableSpec
from nestrec.serving.model.model_adapter import HistoryTokens
from nestrec.serving.model.request_inputs import Candidates, History
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.servable_spec import ColumnSpec, ServableSpec
from nestrec.serving.model.served_tables import DeviceTable, ServedTable
from nestrec.serving.model.serving_spec import NoBackboneConfig, ServingSpec, TrainedRun
from nestrec.tasks.ctr_task import CTRTaskConfig

_TABLE = "categories"
_EMPTY = np.zeros(0, np.int64)


class CTRAdapter:
    """Adapter of models that read numbers and categories: a `DLRM` of a task with labeled rows."""

    tokens_per_event: int = 1
    appends_candidates: bool = False
    max_events: int = 0
    outputs: tuple[str, ...] = ("label",)

    def __init__(self, servable: Servable, slide_events: int):
        self.servable = servable
        self.slide_events = slide_events
        self.encoder = servable.model
        self._model = cast(DLRM, servable.model)
        self._numbers = [c.name for c in servable.spec.columns if not c.has_table]
        self._categories = [c.name for c in servable.spec.columns if c.has_table]

    def follow(self, servable: Servable) -> None:
        self.servable = servable

    def tokens(self, history: History, now_ms: int) -> HistoryTokens:
        """Return empty tokens: the model reads no history."""
        empty_history = history.copied(len(history))
        return HistoryTokens(
            history=empty_history,
            columns=(),
            times_ms=_EMPTY,
            query_times_ms=_EMPTY,
            num_cacheable=0,
            tokens_per_event=1,
        )

    def vectors(self, tokens: HistoryTokens, first: int, end: int) -> torch.Tensor:
        return self._no_tokens

    def candidate_tokens(self, candidates: Candidates) -> torch.Tensor:
        return self._no_tokens

    def scores(self, candidates: Candidates, last_D: torch.Tensor | None, state_CD: torch.Tensor) -> torch.Tensor:
        """Return the logits of candidates, of shape (C, 1)."""
        bits_CN, keys_CF = (_stack_features(candidates, names) for names in (self._numbers, self._categories))
        dense_CN = torch.from_numpy(bits_CN.astype(np.int32).view(np.float32)).to(self.servable.device)
        rows = self._table.rows(torch.from_numpy(keys_CF.ravel())).to(self.servable.dtype)
        category_CFD = self._model.to_width(_TABLE, rows).unflatten(0, keys_CF.shape)
        logits: torch.Tensor = self._model(dense_CN.to(self.servable.dtype), category_CFD)
        return logits.float()[:, None]

    def best(
        self, requests: Sequence[Candidates], last_states: Sequence[torch.Tensor | None]
    ) -> list[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        remedy = "serve a retrieval model as well, or send candidates"
        raise UserError("does not have a retrieval index", option="model", value=self.servable.spec.name, remedy=remedy)

    @property
    def _table(self) -> ServedTable:
        """The one table that all categories share, addressed by keys."""
        return self.servable.tables[self._categories[0]]

    @cached_property
    def _no_tokens(self) -> torch.Tensor:
        servable = self.servable
        return torch.zeros(0, servable.encoder_config.dim, dtype=servable.dtype, device=servable.device)


def _stack_features(candidates: Candidates, names: Sequence[str]) -> NDArray[np.int64]:
    """Stack features of candidates to an array of shape (C, names)."""
    values = np.empty((len(candidates), len(names)), np.int64)
    for index, name in enumerate(names):
        values[:, index] = candidates.features[name]
    return values


def _export(session: TrainedRun, step: int) -> Servable:
    """Create the servable of a training session, with all rows of its table.

    Other keys get the initial rows that training would give them.
    """
    task = cast(CTRTaskConfig, session.cfg.task)
    table: TableConfig = session.engine.tables[_TABLE]
    remedy = "train with the dynamic table of the recipe to serve the model"
    require(
        table.num_rows is None, "tables with hashed keys cannot be served", option="table", value=_TABLE, remedy=remedy
    )
    chunks = list(session.engine.snapshot(_TABLE))
    keys = torch.cat([torch.zeros(0, dtype=torch.int64), *(chunk["keys"] for chunk in chunks)])
    weight = torch.cat([torch.zeros(0, table.dim), *(to_float32(chunk["weight"]) for chunk in chunks)])
    order = keys.argsort()
    is_named = session.dataset.card.source_format == "criteo"
    table_spec = KeyedTableSpec(table=_TABLE, dim=table.dim, seed=table.seed, init=table.init)
    numbers, names = _names(task, is_named=is_named)
    columns = [ColumnSpec(name=EVENT_PREFIX + name, keys=None, num_rows=0, kind="number") for name in numbers]
    for index, name in enumerate(names):
        column_spec = replace(table_spec, hash_key=HASH_KEY + index) if is_named else table_spec
        columns.append(
            ColumnSpec(name=EVENT_PREFIX + name, keys=None, num_rows=len(keys), table=_TABLE, by_key=column_spec)
        )
    rows = KeyedTable(DeviceTable(weight[order]), keys[order].numpy(), table_spec)
    spec = ServableSpec(
        name=session.cfg.name, step=step, task=task, num_items=0, action_bits={}, columns=tuple(columns)
    )  # fmt: skip
    return Servable(
        spec=spec,
        version="",
        model=deepcopy(session.task.model).to("cpu").eval().requires_grad_(False),
        tables={column.name: rows for column in columns if column.has_table},
        item_keys=(),
        index=None,
        item_columns={},
    )


def _names(task: CTRTaskConfig, *, is_named: bool) -> tuple[Sequence[str], Sequence[str]]:
    """Return the names of numbers and of categories in requests."""
    if is_named:
        return DENSE_NAMES, CATEGORY_NAMES
    cfg = task.encoder
    return [f"number_{i + 1}" for i in range(cfg.num_dense)], [f"category_{i + 1}" for i in range(cfg.num_categorical)]


def _model(spec: ServableSpec) -> DLRM:
    task = cast(CTRTaskConfig, spec.task)
    model = DLRM(task.encoder)
    widths = {column.table_name: column.by_key.dim for column in spec.columns if column.by_key is not None}
    model.to_width = FeatureProjections(task.encoder.dim, widths)
    return model


SERVING = ServingSpec(
    role="ranking",
    model=_model,
    make_adapter=CTRAdapter,
    max_history_events=lambda task: 0,
    encoder=lambda task: NoBackboneConfig(task.encoder.dim),
    export=_export,
    reads_items=False,
)
