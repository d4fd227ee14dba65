"""Jobs that ranks run in the tests of context parallelism."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from schedule_jobs import regrouped
from torch import nn

import nestrec
from nestrec.distributed import Topology
from nestrec.distributed.context_ring import ContextRing
from nestrec.distributed.topology import ParallelConfig
from nestrec.models.hstu import HSTU, HSTUConfig
from nestrec.ops.attention.mask_and_bias import PLAIN, AttentionMask, RelativeBias, semi_local
from nestrec.ops.context_parallel.ring_attention import (
    fuxi_attention_in_context,
    hstu_attention_in_context,
    softmax_attention_in_context,
)
from nestrec.ops.context_parallel.ring_sum import ContextParallelGroup
from nestrec.ops.context_parallel.token_partition import TokenPartition

Kind = Literal["plain", "tables", "function", "local", "fuxi", "sasrec"]
KINDS: tuple[Kind, ...] = ("plain", "tables", "function", "local", "fuxi", "sasrec")
NORMALIZER = 7.0


class Case:
    """Random full sequences, equal on every rank, and their partition over the ranks."""

    def __init__(self, kind: Kind, lengths: list[int], size: int) -> None:
        generator = torch.Generator().manual_seed(sum(lengths) + len(lengths))
        draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
        self.kind = kind
        self.parts = TokenPartition(np.array(lengths), size)
        num = sum(lengths)
        self.q, self.k, self.v = (draw(num, 2, 4) for _ in range(3))
        self.rules: AttentionMask = semi_local(3, 2) if kind == "local" else PLAIN
        self.tables = {
            name: draw(count)
            for name, count, kinds in (
                ("position_table", 2 * max(lengths) + 1, ("tables", "function", "local", "fuxi")),
                ("time_table", 12, ("tables", "fuxi")),
                ("time_function", 3, ("function",)),
            )
            if kind in kinds
        }
        times = draw(num).double() * 30, draw(num).double() * 30
        self.times = times if kind in ("tables", "function", "fuxi") else None
        width = (3, 8) if kind == "fuxi" else (2, 4)
        self.grad = draw(num, *width)

    def indices(self, part: int) -> torch.Tensor:
        return torch.from_numpy(self.parts.global_indices(part))

    def bias(self, tables: dict[str, torch.Tensor], indices: torch.Tensor) -> RelativeBias:
        times = (None, None) if self.times is None else tuple(x[indices] for x in self.times)
        return RelativeBias(**tables, time_T=times[0], query_time_T=times[1])


def attention(topology: Topology, kind: Kind, all_lengths: list[list[int]]) -> list[list[torch.Tensor]]:
    """Return the output and the gradients of q, k, v and tables of this rank's part of each batch of sequences."""
    size = topology.world
    ring = ContextRing(regrouped(topology, ParallelConfig(context_parallel=size)))
    results = []
    for lengths in all_lengths:
        case = Case(kind, lengths, size)
        indices = case.indices(ring.rank)
        context = ContextParallelGroup(case.parts, ring)
        q, k, v = (x[indices].requires_grad_() for x in (case.q, case.k, case.v))
        tables = {name: table.requires_grad_() for name, table in case.tables.items()}
        out = forward(case, context, (q, k, v), case.bias(tables, indices))
        gradients = torch.autograd.grad(out, [q, k, v, *tables.values()], case.grad[indices])
        results.append([out.detach(), *gradients])
    return results


def forward(case: Case, context: ContextParallelGroup, qkv: tuple[Any, ...], bias: RelativeBias) -> torch.Tensor:
    if case.kind == "sasrec":
        return softmax_attention_in_context(*qkv, context)
    options: dict[str, Any] = {"normalizer": NORMALIZER, "bias": bias, "rules": case.rules}
    if case.kind == "fuxi":
        return torch.stack(fuxi_attention_in_context(*qkv, context, **options), dim=1)
    return hstu_attention_in_context(*qkv, context, **options)


class CustomModel(nn.Module):
    """A custom model that partitions its sequences itself."""

    def __init__(self, ring: ContextRing) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.encoder = HSTU(HSTUConfig(dim=6, head_dim=3, num_heads=2, dropout=0.3, max_length=40))
        self.ring = ring

    def forward(self, vectors: Mapping[str, Any], batch: Mapping[str, Any]) -> tuple[torch.Tensor, int]:
        items = vectors["item"]
        parts = TokenPartition(batch["length"].numpy(), self.ring.size)
        position = torch.from_numpy(parts.positions(self.ring.rank))
        info = nestrec.SequenceInfo(
            offsets=items.offsets,
            max_length=int(parts.lengths.max()),
            position_T=position,
            token_key_T=batch["item"].values * 977 + position,
            context=ContextParallelGroup(parts, self.ring),
        )
        states = self.encoder(items.values, info)
        return (states - batch["target"].values[:, None]).square().sum(), len(states)


def train_custom_model(topology: Topology, schedule: str, num_steps: int) -> list[float]:
    """Train a pipeline with one context-parallel group of all ranks, and return its losses."""
    topology = regrouped(topology, ParallelConfig(context_parallel=topology.world))
    ring = ContextRing(topology)
    pipeline = nestrec.TrainingPipeline(
        CustomModel(ring),
        [nestrec.Table("items", rows=50, dim=6, features=("item",))],
        schedule=schedule,
        micro_batches=2,
        weight=lambda batch: float(len(batch["item"].values)),
        topology=topology,
        context=ring,
    )
    losses = [float(loss) for loss in pipeline.run(partitioned_batches(ring, num_steps))]
    pipeline.close()
    return losses


def partitioned_batches(ring: ContextRing, num_steps: int) -> list[dict[str, Any]]:
    batches = []
    for step in range(num_steps):
        draw = np.random.default_rng(step)
        lengths = draw.integers(1, 40, 5)
        lengths[step % 5] = 1
        items = draw.integers(0, 50, lengths.sum())
        targets = draw.normal(size=lengths.sum())
        parts = TokenPartition(lengths, ring.size)
        indices = parts.global_indices(ring.rank)
        offsets = torch.from_numpy(parts.offsets(ring.rank))
        values = {"item": torch.from_numpy(items[indices]), "target": torch.from_numpy(targets[indices]).float()}
        fields = {name: nestrec.Jagged(x, offsets) for name, x in values.items()}
        batches.append({**fields, "length": torch.from_numpy(lengths)})
    return batches
