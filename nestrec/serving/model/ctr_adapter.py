"""The form of models of labelled rows (DLRM): candidates are scored by what is told of them, each alone.

There is no catalogue and no history: a request names its candidates as it likes, and tells numbers and categories of
each, or of all of them at once (`context`). Nothing is computed ahead and nothing is kept.

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
from nestrec.ops.embedding.stochastic_rounding import whole
from nestrec.serving.model.item_id_map import KeyedTable, KeyedTableSpec
from nestrec.serving.model.model_adapter import HistoryTokens
from nestrec.serving.model.request_inputs import Candidates, History
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.servable_spec import ColumnSpec, ServableSpec
from nestrec.serving.model.served_tables import DeviceTable, ServedTable
from nestrec.serving.model.serving_spec import NoBackboneConfig, ServingSpec, TrainedRun
from nestrec.tasks.ctr_task import CTRTaskConfig

_TABLE = "categories"
_NONE = np.zeros(0, np.int64)


class CTRAdapter:
    """Models of numbers and categories: a `DLRM`, and a task of rows."""

    tokens_an_event: int = 1
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
        """None: whatever the user did before is not read."""
        nothing = history.copied(len(history))
        return HistoryTokens(
            history=nothing, columns=(), times_ms=_NONE, asked_ms=_NONE, num_cacheable=0, tokens_an_event=1
        )  # fmt: skip

    def vectors(self, tokens: HistoryTokens, first: int, end: int) -> torch.Tensor:
        return self._nobody

    def candidate_tokens(self, candidates: Candidates) -> torch.Tensor:
        return self._nobody

    def scores(self, candidates: Candidates, last_D: torch.Tensor | None, state_CD: torch.Tensor) -> torch.Tensor:
        """(C, 1) logits"""
        bits_CN, keys_CF = (_side_by_side(candidates, names) for names in (self._numbers, self._categories))
        dense_CN = torch.from_numpy(bits_CN.astype(np.int32).view(np.float32)).to(self.servable.device)
        rows = self._table.rows(torch.from_numpy(keys_CF.ravel())).to(self.servable.dtype)
        category_CFD = self._model.to_width(_TABLE, rows).unflatten(0, keys_CF.shape)
        logits: torch.Tensor = self._model(dense_CN.to(self.servable.dtype), category_CFD)
        return logits.float()[:, None]

    def best(
        self, asked: Sequence[Candidates], last: Sequence[torch.Tensor | None]
    ) -> list[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        remedy = "serve a retrieval model beside it, or give candidates"
        raise UserError("has no retrieval index", option="model", value=self.servable.spec.name, remedy=remedy)

    @property
    def _table(self) -> ServedTable:
        """All categories are keys of one."""
        return self.servable.tables[self._categories[0]]

    @cached_property
    def _nobody(self) -> torch.Tensor:
        servable = self.servable
        return torch.zeros(0, servable.encoder_config.dim, dtype=servable.dtype, device=servable.device)


def _side_by_side(candidates: Candidates, names: Sequence[str]) -> NDArray[np.int64]:
    """(C, names)"""
    values = np.empty((len(candidates), len(names)), np.int64)
    for place, name in enumerate(names):
        values[:, place] = candidates.features[name]
    return values


def _exported(session: TrainedRun, step: int) -> Servable:
    """The model of a session with every row that its table has; other keys begin as they would in training."""
    task = cast(CTRTaskConfig, session.cfg.task)
    table: TableConfig = session.engine.tables[_TABLE]
    remedy = "train with the dynamic table of the recipe to serve the model"
    require(table.num_rows is None, "has rows for hashes of keys", option="table", value=_TABLE, remedy=remedy)
    chunks = list(session.engine.snapshot(_TABLE))
    keys = torch.cat([torch.zeros(0, dtype=torch.int64), *(chunk["keys"] for chunk in chunks)])
    weight = torch.cat([torch.zeros(0, table.dim), *(whole(chunk["weight"]) for chunk in chunks)])
    order = keys.argsort()
    is_named = session.dataset.card.source_format == "criteo"
    begins = KeyedTableSpec(table=_TABLE, dim=table.dim, seed=table.seed, init=table.init)
    numbers, names = _names(task, is_named=is_named)
    columns = [ColumnSpec(name=EVENT_PREFIX + name, keys=None, num_rows=0, kind="number") for name in numbers]
    for place, name in enumerate(names):
        own = replace(begins, hash_key=HASH_KEY + place) if is_named else begins
        columns.append(
            ColumnSpec(name=EVENT_PREFIX + name, keys=None, num_rows=len(keys), table=_TABLE, by_key=own)
        )  # fmt: skip
    rows = KeyedTable(DeviceTable(weight[order]), keys[order].numpy(), begins)
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
    """Of numbers and categories, as requests tell them."""
    if is_named:
        return DENSE_NAMES, CATEGORY_NAMES
    cfg = task.encoder
    return [f"number_{i + 1}" for i in range(cfg.num_dense)], [f"category_{i + 1}" for i in range(cfg.num_categories)]


def _model(spec: ServableSpec) -> DLRM:
    task = cast(CTRTaskConfig, spec.task)
    model = DLRM(task.encoder)
    widths = {column.table_name: column.by_key.dim for column in spec.columns if column.by_key is not None}
    model.to_width = FeatureProjections(task.encoder.dim, widths)
    return model


SERVING = ServingSpec(
    role="ranking",
    model=_model,
    form=CTRAdapter,
    longest_history=lambda task: 0,
    encoder=lambda task: NoBackboneConfig(task.encoder.dim),
    exported=_exported,
    reads_items=False,
)
