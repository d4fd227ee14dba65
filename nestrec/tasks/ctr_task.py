"""Labelled rows of dense numbers and categories (Criteo): click prediction with a DLRM."""

from collections.abc import Mapping
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from nestrec.base.config import config
from nestrec.base.config_values import Count, Decay
from nestrec.base.errors import UserError
from nestrec.data.batch_loader import MicroBatch
from nestrec.data.dataset import Dataset
from nestrec.data.dataset_schema import LABEL
from nestrec.data.samples.chunk_collator import CTRCollator, assemble_rows
from nestrec.data.samples.split import Part
from nestrec.embedding import EmbeddingEngine, InitConfig, RowOptimizerConfig, StoreConfig, TableConfig
from nestrec.models.backbone_spec import ForwardFlops
from nestrec.models.dlrm import DLRM, DLRMConfig
from nestrec.models.encoder_parts import FeatureProjections
from nestrec.ops.embedding.row_gather import TableRows, gather_rows
from nestrec.pipeline.exchange_window import on_device
from nestrec.tasks.metrics import ConfidenceInterval, auc, bootstrap, bootstrap_auc, log_loss, normalised_entropy
from nestrec.tasks.table_overrides import ResolvedTables, chosen_tables
from nestrec.tasks.task import Evaluation, Task, TaskSpec, TrainingCost, share_of_ranks, sum_over_ranks


@config
class CTRTaskConfig:
    kind: Literal["rows"] = "rows"
    """click prediction on labelled rows"""
    encoder: DLRMConfig = DLRMConfig()
    """the network"""
    valid_share: Decay = 0.1
    """of the rows, in file order before the test rows"""
    test_share: Decay = 0.1
    """of the rows, the last ones in file order"""
    table_init: InitConfig = InitConfig(scale=0.02)
    """first values of category vectors"""
    table_optimizer: RowOptimizerConfig = RowOptimizerConfig(kind="rowwise_adagrad")
    """row optimiser of the category table"""
    table_store: StoreConfig = StoreConfig(kind="dram")
    """where the category table lives; its keys are hashes, so it is dynamic"""
    batch_rows: Count = 4096
    """rows scored at a time"""

    def __post_init__(self) -> None:
        if self.valid_share + self.test_share >= 1:
            raise UserError(
                f"leaves nothing to train on beside task.test_share = {self.test_share}",
                option="task.valid_share",
                value=self.valid_share,
                remedy="give two shares that sum to less than 1",
            )


class CTRTask(Task):
    model: DLRM
    reads_stored_rows = True
    remedy_if_empty = "give it more rows, or other shares: --task.valid_share, --task.test_share"

    def __init__(self, cfg: CTRTaskConfig, dataset: Dataset, *, seed: int, dtype: Literal["float32", "float64"]):
        if dataset.card.kind != "rows":
            raise UserError(
                "holds sequences, not labelled rows",
                option="data.folder",
                value=str(dataset.folder),
                remedy="prepare a file of labelled rows, such as Criteo's",
            )
        self.cfg = cfg
        self._dataset = dataset
        total = dataset.num_samples
        test_at = total - round(total * cfg.test_share)
        valid_at = test_at - round(total * cfg.valid_share)
        self._parts: dict[Part, NDArray[np.int64]] = {
            "valid": np.arange(valid_at, test_at),
            "test": np.arange(test_at, total),
        }
        self._train = np.arange(valid_at)
        self.model = DLRM(cfg.encoder)
        self.tables = (
            TableConfig(
                name="categories",
                dim=cfg.encoder.dim,
                num_rows=None,
                features=("category",),
                dtype=dtype,
                seed=seed,
                init=cfg.table_init,
                optimizer=cfg.table_optimizer,
                store=cfg.table_store,
            ),
        )
        self.take(chosen_tables(self.tables, {}))
        self.assembler = CTRCollator(dataset, self._train)

    def take(self, chosen: ResolvedTables) -> None:
        self.tables = chosen.tables
        self.num_ids = chosen.num_ids
        self.model.to_width = FeatureProjections(
            self.cfg.encoder.dim, {table.name: table.dim for table in chosen.tables}
        )

    def num_held_out(self, part: Part) -> int:
        return len(self._parts[part])

    def cost(self) -> TrainingCost:
        """A row is a token: two networks, and the dot products of all vectors."""
        cfg = self.cfg.encoder
        num_vectors = self.cfg.encoder.num_categories + 1
        linears = [m for m in self.model.modules() if isinstance(m, nn.Linear)]
        products = sum(m.weight.numel() for m in linears) + num_vectors**2 * cfg.dim
        kept = sum(m.in_features + m.out_features for m in linears) + num_vectors * (cfg.dim + num_vectors)
        return TrainingCost(flops=ForwardFlops(token=2.0 * products), activations=float(kept))

    def loss(self, batch: MicroBatch, rows: Mapping[str, TableRows], index: Mapping[str, torch.Tensor]) -> torch.Tensor:
        category_BCD = self.model.to_width("categories", gather_rows(rows["categories"], index["category"]))
        logit_B = self.model(batch.tensors["dense"].to(category_BCD.dtype), category_BCD)
        return binary_cross_entropy_with_logits(logit_B, batch.tensors["label"].to(logit_B.dtype), reduction="sum")

    def evaluate(self, engine: EmbeddingEngine, part: Part) -> Evaluation:
        rows = self._parts[part]
        label = self._dataset.rows(rows).scalars["label"].astype(np.int64)
        logit = self._logits(engine, rows)
        base_rate = self._base_rate
        base_logit = np.full(len(rows), np.log(base_rate / (1 - base_rate)))
        systems = {
            "model": {"auc": bootstrap_auc(label, logit, rows), **_losses(label, logit)},
            "base rate": {"auc": ConfidenceInterval(auc(label, base_logit), 0.5, 0.5), **_losses(label, base_logit)},
        }
        return Evaluation(part, "auc", systems, {"logit": logit, "label": label, "users": rows})

    @cached_property
    def _base_rate(self) -> float:
        """Of the training rows, which are the first ones."""
        labels = (
            group.scalars[LABEL][: max(0, len(self._train) - first)] for first, group in self._dataset.scan([LABEL])
        )
        share = sum(float(part.sum()) for part in labels) / len(self._train)
        half = 0.5 / len(self._train)  # of a row: if all labels are alike, its odds are still finite
        return float(np.clip(share, half, 1 - half))

    def _logits(self, engine: EmbeddingEngine, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        out = np.zeros(len(rows))
        topology = engine.topology
        for chosen in share_of_ranks(np.arange(len(rows)), self.cfg.batch_rows, topology.rank, topology.world):
            batch = assemble_rows(self._dataset.rows(rows[chosen]))
            vectors = engine.lookup_readonly(batch.keys)["category"]
            if len(chosen) == 0:
                continue
            moved = on_device(batch, engine.device)
            with torch.no_grad():
                category_BCD = self.model.to_width("categories", vectors)
                logit_B = self.model(moved.tensors["dense"].to(vectors.dtype), category_BCD)
                out[chosen] = logit_B.double().cpu().numpy()
        return sum_over_ranks(topology, out)


def _losses(label: NDArray[np.int64], logit: NDArray[np.float64]) -> dict[str, ConfidenceInterval]:
    entropy = normalised_entropy(label, logit)
    return {
        **bootstrap({"log_loss": log_loss(label, logit)}),
        "ne": ConfidenceInterval(entropy, float("nan"), float("nan")),
    }


TASK = TaskSpec(
    config=CTRTaskConfig,
    make=CTRTask,
    store_field="table_store",
    serving="rows",
)
