"""Dense part of the compared training jobs, and the job of nestrec.

The dense part is a tower over the sequence and a head. Tower `mlp` is the mean of the sequence and one linear layer, so
that the sparse path dominates. Tower `bucket` is a small transformer as an experienced PyTorch user would write it: its
linear layers process only real tokens, and its attention is padded within chunks of samples of similar length.

The job of nestrec is written as by a user, for one rank and with the serial schedule. All ranks have the same number of
samples, so that the mean over the global batch is the mean of the means of the ranks.

Shapes: B samples, T tokens of all samples, L tokens of the longest sample of a chunk, D elements of a vector.
"""

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from nestrec import __version__
from nestrec.distributed import Topology
from nestrec.embedding import RowOptimizerConfig, TableConfig
from nestrec.jagged import Jagged, offsets_of
from nestrec.pipeline import TrainingPipeline
from nestrec_bench.external.external_workload import BAG, SEQUENCE, TABLE_OF, PeersBatch, PeersWorkload, WorkloadConfig

DenseKind = Literal["mlp", "bucket"]
DENSE_KINDS: tuple[DenseKind, ...] = ("mlp", "bucket")
_CHUNKS = 16


class DensePart(nn.Module):
    """Dense part of the model; its initial parameters are the same in every system."""

    def __init__(self, cfg: WorkloadConfig, kind: DenseKind) -> None:
        super().__init__()
        torch.manual_seed(cfg.seed)
        self.tower = MeanTower(cfg) if kind == "mlp" else SequenceTower(cfg)
        self.head = Head(cfg)

    def forward(
        self,
        tokens_TD: torch.Tensor,
        lengths_B: torch.Tensor,
        bags_BD: torch.Tensor,
        dense: torch.Tensor,
        label_B: torch.Tensor,
    ) -> torch.Tensor:
        """Return the mean loss of the samples."""
        loss: torch.Tensor = self.head(dense, self.tower(tokens_TD, lengths_B), bags_BD, label_B)
        return loss


class MeanTower(nn.Module):
    """Linear layer over the mean of a sample's tokens, with an output of shape (B, D)."""

    def __init__(self, cfg: WorkloadConfig) -> None:
        super().__init__()
        self.projection = nn.Linear(cfg.dim, cfg.dim)

    def forward(self, tokens_TD: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        return F.relu(self.projection(_mean(tokens_TD, _sample_of_token(lengths_B, len(tokens_TD)), lengths_B)))


class SequenceTower(nn.Module):
    """Transformer over a sample's tokens, with averaged outputs of shape (B, D)."""

    def __init__(self, cfg: WorkloadConfig) -> None:
        super().__init__()
        self.position = nn.Embedding(cfg.max_length, cfg.dim)
        self.layers = nn.ModuleList(Layer(cfg) for _ in range(cfg.num_layers))
        self.norm = nn.LayerNorm(cfg.dim)

    def forward(self, tokens_TD: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        sample_T = _sample_of_token(lengths_B, len(tokens_TD))
        starts_B = lengths_B.cumsum(0) - lengths_B
        x_TD = tokens_TD + self.position(torch.arange(len(tokens_TD)) - starts_B[sample_T])
        chunks = [_chunk(starts_B[samples], lengths_B[samples]) for samples in lengths_B.argsort().chunk(_CHUNKS)]
        for layer in self.layers:
            x_TD = layer(x_TD, chunks)
        return _mean(self.norm(x_TD), sample_T, lengths_B)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Samples of similar length, padded to the longest of them."""

    index_BL: torch.Tensor
    """Indices of their tokens; 0 for padding."""
    mask_BL: torch.Tensor
    tokens: torch.Tensor
    """Indices of the real tokens, concatenated over samples."""


class Layer(nn.Module):
    """Pre-norm transformer layer: attention and a feed-forward network, each with a residual connection."""

    def __init__(self, cfg: WorkloadConfig) -> None:
        super().__init__()
        self._num_heads = cfg.num_heads
        self.norm1 = nn.LayerNorm(cfg.dim)
        self.norm2 = nn.LayerNorm(cfg.dim)
        self.qkv = nn.Linear(cfg.dim, 3 * cfg.dim)
        self.out = nn.Linear(cfg.dim, cfg.dim)
        self.up = nn.Linear(cfg.dim, cfg.ffn_dim)
        self.down = nn.Linear(cfg.ffn_dim, cfg.dim)

    def forward(self, x_TD: torch.Tensor, chunks: list[Chunk]) -> torch.Tensor:
        qkv = self.qkv(self.norm1(x_TD))
        attended = torch.cat([self._attention(qkv[c.index_BL], c.mask_BL)[c.mask_BL] for c in chunks])
        attended_TD = torch.empty_like(x_TD).index_copy(0, torch.cat([c.tokens for c in chunks]), attended)
        x_TD = x_TD + self.out(attended_TD)
        out_TD: torch.Tensor = x_TD + self.down(F.gelu(self.up(self.norm2(x_TD))))
        return out_TD

    def _attention(self, qkv: torch.Tensor, mask_BL: torch.Tensor) -> torch.Tensor:
        num_samples, length, width = qkv.shape
        heads = qkv.view(num_samples, length, 3, self._num_heads, width // 3 // self._num_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_BL[:, None, None, :])
        return y.transpose(1, 2).reshape(num_samples, length, width // 3)


class Head(nn.Module):
    """Head of DLRM: bottom MLP of the dense inputs, dot products of the three vectors, top MLP, and the mean loss."""

    def __init__(self, cfg: WorkloadConfig) -> None:
        super().__init__()
        dim = cfg.dim
        self.bottom = nn.Sequential(nn.Linear(cfg.num_dense, 256), nn.ReLU(), nn.Linear(256, dim), nn.ReLU())
        self.top = nn.Sequential(
            nn.Linear(3 * dim + 3, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(
        self, dense: torch.Tensor, sequence_BD: torch.Tensor, bags_BD: torch.Tensor, label_B: torch.Tensor
    ) -> torch.Tensor:
        bottom_BD = self.bottom(dense)
        vectors = torch.stack([bottom_BD, sequence_BD, bags_BD], 1)
        dots = torch.bmm(vectors, vectors.transpose(1, 2))
        pairs = dots[:, 0, 1:2], dots[:, 0, 2:3], dots[:, 1, 2:3]
        logits_B = self.top(torch.cat([bottom_BD, sequence_BD, bags_BD, *pairs], 1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits_B, label_B)


def _sample_of_token(lengths_B: torch.Tensor, num_tokens: int) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths_B)), lengths_B, output_size=num_tokens)


def _mean(tokens_TD: torch.Tensor, sample_T: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    total_BD = torch.zeros(len(lengths_B), tokens_TD.shape[1]).index_add(0, sample_T, tokens_TD)
    return total_BD / lengths_B[:, None]


def _chunk(starts_B: torch.Tensor, lengths_B: torch.Tensor) -> Chunk:
    position_L = torch.arange(int(lengths_B.max()))
    mask_BL = position_L[None, :] < lengths_B[:, None]
    index_BL = torch.where(mask_BL, starts_B[:, None] + position_L[None, :], 0)
    return Chunk(index_BL, mask_BL, index_BL[mask_BL])


ROW_LEARNING_RATE = 0.05
ROW_EPS = 1e-8
DENSE_LEARNING_RATE = 1e-3
_LOAD_ROWS = 1 << 16
OUR_MODES = ("serial", "serial_gloo")
"""Serial schedule, with exchanges through shared memory or, as in TorchRec, through the sockets of Gloo."""


class Job(Protocol):
    """Training job of one system on one rank."""

    system: str
    version: str
    mode: str
    losses: list[torch.Tensor]
    """Loss of each past step, of the global batch or of this rank's samples."""

    def step(self) -> None:
        """Run one training step. Collective."""


class _PeersModel(nn.Module):
    def __init__(self, workload: PeersWorkload, dense: DenseKind) -> None:
        super().__init__()
        self.dense = DensePart(workload.cfg, dense)

    def forward(self, vectors: dict[str, Any], batch: dict[str, Any]) -> tuple[torch.Tensor, int]:
        sequence = vectors[SEQUENCE]
        label = batch["label"]
        mean = self.dense(sequence.values, sequence.lengths(), vectors[BAG], batch["dense"], label)
        return mean * len(label), len(label)


class NestrecJob:
    """Training job of nestrec: a user-defined module in `nestrec.TrainingPipeline`."""

    system = "nestrec"
    version = __version__

    def __init__(
        self,
        workload: PeersWorkload,
        batches: Sequence[PeersBatch],
        dense: DenseKind,
        topology: Topology,
        mode: str = "serial",
    ) -> None:
        self.mode = mode
        model = _PeersModel(workload, dense)
        self.pipeline = TrainingPipeline(
            model,
            _tables(workload),
            dense_optimizer=torch.optim.Adam(model.parameters(), lr=DENSE_LEARNING_RATE),
            table_learning_rate=ROW_LEARNING_RATE,
            pooled=(BAG,),
            device="cpu",
            topology=topology,
        )
        for number, table in enumerate(TABLE_OF.values()):
            self.pipeline.engine.load(table, _first_rows(workload, number))
        self._trained = self.pipeline.run(itertools.cycle([_as_fields(batch) for batch in batches]))
        self.losses: list[torch.Tensor] = []

    def step(self) -> None:
        """Run one training step. Collective."""
        self.losses.append(next(self._trained))

    def parts_ms(self) -> dict[str, list[float]]:
        """Return a mapping of each stage of a step to [its median time], in the training thread."""
        spans: dict[str, list[int]] = {}
        for span in self.pipeline.tracer.spans():
            if span.kind != "step":
                spans.setdefault(span.name.removeprefix("train."), []).append(span.duration_ns)
        return {name: [round(1e-6 * statistics.median(times), 2)] for name, times in spans.items()}


def _as_fields(batch: PeersBatch) -> dict[str, Any]:
    jagged = {name: Jagged(keys, offsets_of(batch.lengths[name])) for name, keys in batch.keys.items()}
    return {**jagged, "dense": batch.dense, "label": batch.label}


def _tables(workload: PeersWorkload) -> list[TableConfig]:
    cfg = workload.cfg
    optimizer = RowOptimizerConfig(kind="rowwise_adagrad", eps=ROW_EPS)
    return [
        TableConfig(name=table, dim=cfg.dim, num_rows=cfg.num_rows, features=(feature,), optimizer=optimizer)
        for feature, table in TABLE_OF.items()
    ]


def _first_rows(workload: PeersWorkload, table: int) -> Iterator[dict[str, torch.Tensor]]:
    num_rows = workload.cfg.num_rows
    for low in range(0, num_rows, _LOAD_ROWS):
        high = min(low + _LOAD_ROWS, num_rows)
        yield {"keys": torch.arange(low, high), "weight": workload.first_rows(table, low, high)}
