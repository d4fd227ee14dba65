"""Task: next-item retrieval with the pairwise BPR loss. Samples, tables and metrics are those of the retrieval task.

    loss of a token = mean over negatives of log(1 + exp(margin + score(negative) - score(positive)))

Legend: T tokens, R negatives of a token, U rows, D channels.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from torch.nn.functional import softplus

from nestrec import TaskSpec, config
from nestrec.base.config_values import NonNegative
from nestrec.data.batch_loader import MicroBatch
from nestrec.ops.embedding.row_gather import TableRows, gather_rows
from nestrec.tasks.retrieval_task import RetrievalTask, RetrievalTaskConfig
from nestrec.tasks.task import sequence_info


@config
class PairwiseTaskConfig(RetrievalTaskConfig):
    kind: Literal["pairwise"] = "pairwise"  # type: ignore[assignment]
    """Name of the task: next-item retrieval with a pairwise loss."""
    margin: NonNegative = 0.0
    """Margin by which the score of a positive should exceed that of a negative."""


class PairwiseTask(RetrievalTask):
    cfg: PairwiseTaskConfig

    def loss(self, batch: MicroBatch, rows: Mapping[str, TableRows], index: Mapping[str, torch.Tensor]) -> torch.Tensor:
        query_TD = self.model(gather_rows(rows["items"], index["history"]), sequence_info(batch))
        item_UD = self.model.loss_rows(rows["items"])
        positive_T = (query_TD * gather_rows(item_UD, index["positive"])).sum(1)
        negative_TR = torch.einsum("td,trd->tr", query_TD, gather_rows(item_UD, index["negative"]))
        return softplus(self.cfg.margin + negative_TR - positive_T[:, None]).mean(1).sum()


PAIRWISE = TaskSpec(
    config=PairwiseTaskConfig,
    make=PairwiseTask,
    store_field="table_store",
    serving="retrieval",  # a RetrievalModel that reads a history is served like the built-in ones
)
