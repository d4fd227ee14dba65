"""Click-through-rate (CTR) prediction with a DLRM on labeled rows of dense numbers and categories, such as Criteo."""

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
from nestrec.data.samples.chunk_collator import CTRCollator, collate_rows
from nestrec.data.samples.split import Part
from nestrec.embedding import EmbeddingEngine, InitConfig, RowOptimizerConfig, StoreConfig, TableConfig
from nestrec.models.backbone_spec import ForwardFlops
from nestrec.models.dlrm import DLRM, DLRMConfig
from nestrec.models.encoder_parts import FeatureProjections
from nestrec.ops.embedding.row_gather import TableRows, gather_rows
from nestrec.pipeline.exchange_window import on_device
from nestrec.tasks.metrics import ConfidenceInterval, auc, bootstrap, bootstrap_auc, log_loss, normalized_entropy
from nestrec.tasks.table_overrides import ResolvedTables, resolve_tables
from nestrec.tasks.task import Evaluation, Task, TaskSpec, TrainingCost, batches_of_rank, sum_over_ranks


@config
class CTRSplitConfig:
    """Split of labeled rows by their position in the file."""

    valid_fraction: Decay = 0.1
    """Fraction of the rows for validation: the rows before the test rows in file order."""
    test_fraction: Decay = 0.1
    """Fraction of the rows for testing: the last rows in file order."""

    def __post_init__(self) -> None:
        if self.valid_fraction + self.test_fraction >= 1:
            raise UserError(
                f"no rows are left for training, because the test fraction is {self.test_fraction}",
                option="task.split.valid_fraction",
                value=self.valid_fraction,
                remedy="set two fractions that sum to less than 1",
            )


@config
class CTREvaluationConfig:
    """Evaluation options of the CTR task."""

    batch_size: Count = 4096
    """Number of rows scored per batch in evaluation."""


@config
class CTRTaskConfig:
    """Configuration of CTR prediction on labeled rows."""

    kind: Literal["rows"] = "rows"
    """Name of the task: CTR prediction on labeled rows."""
    encoder: DLRMConfig = DLRMConfig()
    """The DLRM: embedding dimension, bottom and top MLP."""
    split: CTRSplitConfig = CTRSplitConfig()
    """Split into training, validation and test rows, in file order."""
    table_init: InitConfig = InitConfig(scale=0.02)
    """Initialization of the category embeddings."""
    table_optimizer: RowOptimizerConfig = RowOptimizerConfig(kind="rowwise_adagrad")
    """Row optimizer of the category table."""
    table_store: StoreConfig = StoreConfig(kind="dram")
    """Storage tier of the category table; the table is dynamic because its keys are hashes."""
    evaluation: CTREvaluationConfig = CTREvaluationConfig()
    """Evaluation options."""


class CTRTask(Task):
    """CTR prediction with a DLRM and one dynamic embedding table for all categories."""

    model: DLRM
    reads_stored_rows = True
    remedy_if_empty = "prepare more rows, or change the fractions --task.valid_fraction and --task.test_fraction"

    def __init__(self, cfg: CTRTaskConfig, dataset: Dataset, *, seed: int, dtype: Literal["float32", "float64"]):
        if dataset.card.kind != "rows":
            raise UserError(
                "this dataset contains sequences, but the task needs labeled rows",
                option="data.folder",
                value=str(dataset.folder),
                remedy="prepare a file of labeled rows, such as Criteo's",
            )
        self.cfg = cfg
        self._dataset = dataset
        total = dataset.num_samples
        test_at = total - round(total * cfg.split.test_fraction)
        valid_at = test_at - round(total * cfg.split.valid_fraction)
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
        self.set_tables(resolve_tables(self.tables, {}))
        self.collator = CTRCollator(dataset, self._train)

    def set_tables(self, chosen: ResolvedTables) -> None:
        self.tables = chosen.tables
        self.num_ids = chosen.num_ids
        self.model.to_width = FeatureProjections(
            self.cfg.encoder.dim, {table.name: table.dim for table in chosen.tables}
        )

    def num_held_out(self, part: Part) -> int:
        return len(self._parts[part])

    def cost(self) -> TrainingCost:
        """Return the cost of a row, which counts as one token: two MLPs and the dot products of all vector pairs."""
        cfg = self.cfg.encoder
        num_vectors = self.cfg.encoder.num_categorical + 1
        linears = [m for m in self.model.modules() if isinstance(m, nn.Linear)]
        products = sum(m.weight.numel() for m in linears) + num_vectors**2 * cfg.dim
        activations = sum(m.in_features + m.out_features for m in linears) + num_vectors * (cfg.dim + num_vectors)
        return TrainingCost(flops=ForwardFlops(token=2.0 * products), activations=float(activations))

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
        """Fraction of positive labels among the training rows, which are the first rows of the file."""
        labels = (
            group.scalars[LABEL][: max(0, len(self._train) - first)] for first, group in self._dataset.scan([LABEL])
        )
        rate = sum(float(part.sum()) for part in labels) / len(self._train)
        half = 0.5 / len(self._train)  # half a row keeps the log odds finite if all labels are equal
        return float(np.clip(rate, half, 1 - half))

    def _logits(self, engine: EmbeddingEngine, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        out = np.zeros(len(rows))
        topology = engine.topology
        for chosen in batches_of_rank(
            np.arange(len(rows)), self.cfg.evaluation.batch_size, topology.rank, topology.world
        ):
            batch = collate_rows(self._dataset.rows(rows[chosen]))
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
    entropy = normalized_entropy(label, logit)
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
