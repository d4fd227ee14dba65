"""Servable models with random weights, for benchmarks and tests that do not need a trained model."""

from hashlib import sha256

import torch

from nestrec.data.samples.ranking_collator import RankingHistoryConfig, RankingInputConfig
from nestrec.data.samples.retrieval_collator import HistoryConfig
from nestrec.models.backbone_registry import EncoderConfig
from nestrec.models.heads import RankingModel, RetrievalModel
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.servable_spec import ColumnSpec, ServableSpec
from nestrec.serving.model.served_tables import DeviceTable
from nestrec.tasks.ranking_task import RankingTaskConfig
from nestrec.tasks.retrieval_task import RetrievalTaskConfig

ACTION_BITS = {"click": 1, "like": 2}


def random_retrieval(
    encoder: EncoderConfig,
    *,
    num_items: int = 1000,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Servable:
    """Return a retrieval model with the item keys "1", "2", ..."""
    torch.manual_seed(seed)
    task = RetrievalTaskConfig(encoder=encoder, history=HistoryConfig(max_events=encoder.max_length))
    model = RetrievalModel(task.encoder, task.similarity)
    items = _table(num_items + 1, encoder.dim, device).to(dtype)
    spec = ServableSpec(name="random", step=0, task=task, num_items=num_items, action_bits={})
    return Servable(
        spec=spec,
        version=_version(spec, seed),
        model=_ready(model, device).to(dtype),
        tables={"items": DeviceTable(items)},
        item_keys=_keys(num_items),
        index=DeviceTable(model.item_vectors(items[1:])),
        item_columns={},
    )


def random_ranking(
    encoder: EncoderConfig,
    *,
    num_items: int = 1000,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Servable:
    """Return a ranking model with two action bits and one event feature.

    Histories have at most `encoder.max_length` / 2 - 1 events.
    """
    torch.manual_seed(seed)
    inputs = RankingInputConfig(labels=tuple(ACTION_BITS), event_features=("tab",))
    history = RankingHistoryConfig(max_events=encoder.max_length // 2)
    task = RankingTaskConfig(encoder=encoder, history=history, inputs=inputs)
    model = RankingModel(task.encoder, task.head, num_tasks=len(ACTION_BITS), num_action_bits=len(ACTION_BITS))
    columns = (ColumnSpec(name="event_tab", keys=("home", "search"), num_rows=3),)
    spec = ServableSpec(name="random", step=0, task=task, num_items=num_items, action_bits=ACTION_BITS, columns=columns)
    tables = {
        name: DeviceTable(_table(num_rows, encoder.dim, device).to(dtype))
        for name, num_rows in (("items", num_items + 1), ("event_tab", 3))
    }
    return Servable(
        spec=spec,
        version=_version(spec, seed),
        model=_ready(model, device).to(dtype),
        tables=tables,
        item_keys=_keys(num_items),
        index=None,
        item_columns={},
    )


def _ready(model: RetrievalModel | RankingModel, device: torch.device | str) -> RetrievalModel | RankingModel:
    return model.to(device).eval().requires_grad_(False)


def _table(num_rows: int, dim: int, device: torch.device | str) -> torch.Tensor:
    return torch.randn(num_rows, dim).mul_(0.05).to(device)


def _keys(num_items: int) -> tuple[str, ...]:
    return tuple(str(i) for i in range(1, num_items + 1))


def _version(spec: ServableSpec, seed: int) -> str:
    return sha256(f"{spec} {seed}".encode()).hexdigest()
