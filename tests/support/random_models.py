"""Random models with user features as prefix tokens before each history; ranking models also read interactions."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from nestrec.models.backbone_registry import EncoderConfig
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.servable_spec import ColumnSpec
from nestrec.serving.model.served_tables import DeviceTable

FEATURES = ("country", "age", "city")
"""User features: an odd number of tokens, from a list, a number and a vector."""


def with_user_prefix(make_model: Callable[..., Servable]) -> Callable[..., Servable]:
    """Return a variant of a function of `nestrec_bench.harness.random_model` whose models read user features."""

    def make(encoder: EncoderConfig, **options: Any) -> Servable:
        servable = make_model(encoder, **options)
        task: Any = servable.spec.task
        task = replace(task, inputs=replace(task.inputs, user_features=FEATURES, user_feature_mode="prefix"))
        if hasattr(task, "head"):
            task = replace(task, head=replace(task.head, interactions=True))
        columns = [
            ColumnSpec(name="user_country", keys=("a", "b"), num_rows=3, kind="categories", pooling="mean", most_ids=3),
            ColumnSpec(name="user_age", keys=None, num_rows=0, kind="number", width=2),
            ColumnSpec(name="user_city", keys=None, num_rows=0, kind="vector", width=5),
        ]
        spec = replace(servable.spec, task=task, columns=(*servable.spec.columns, *columns))
        tables = {c.name: torch.randn(3, encoder.dim) * 0.05 for c in columns if c.has_table}
        served = {name: DeviceTable(rows.to(servable.device, servable.dtype)) for name, rows in tables.items()}
        model = servable.serving.model(spec).to(servable.device, servable.dtype).eval().requires_grad_(False)
        return replace(servable, spec=spec, model=model, tables={**servable.tables, **served})

    return make
