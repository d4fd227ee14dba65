"""Exchanges and computation of one batch between two parameter updates.

Forward and backward of a loss on looked-up rows.

What a rank holds of a batch while it computes: vectors that have come, gradients that wait to go.

    receive(i)       collective    the vectors of micro-batch i come
    vectors(i)       local         vectors of its distinct keys, in the order of its index
    keep(i, grads)   local         their gradients
    send(i)          collective    gradients go to the owners, which add them up

Without the window cache each micro-batch stands alone. With it, vectors stay for the later micro-batches that
use them too, and gradients are summed here, in order of micro-batch, until the last use of their key.

A window whose exchanges come in two portions, of exclusive and of shared rows (see collisions).
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal, cast

import torch

from nestrec.base.cuda import sent_to_device, used_here
from nestrec.data.batch_loader import MicroBatch
from nestrec.embedding import EmbeddingEngine, RoutedKeys, WorkingSet
from nestrec.embedding.routing.batch_overlap import Portion
from nestrec.embedding.routing.key_routing import RoutedMicroBatch
from nestrec.embedding.routing.row_exchange import ConcatRows, gradient_run, joined_gradients, vector_run, vectors_of
from nestrec.ops.embedding.row_copy import add_spans, gather_spans
from nestrec.ops.embedding.row_gather import HalfPrecisionRows, TableRows
from nestrec.ops.embedding.stochastic_rounding import HALF_TYPES, whole
from nestrec.ops.layers.fp8 import check_fp8, fp8_products

Coupling = Literal["micro_batch", "batch"]


"""Which other samples the loss of a sample may depend on: those of its micro-batch, or all of a rank's batch."""


Precision = Literal["fp32", "tf32", "bf16", "fp8"]
Tensors = Mapping[str, torch.Tensor]
Loss = Callable[[MicroBatch, Tensors, Tensors], torch.Tensor]
"""(micro-batch on the device; for each table the (U, D) distinct rows; for each feature the places of its keys in the
rows of its table) to the sum of the losses."""


class LossCompute:
    """Runs a loss on the device. The caller owns the rows; dense gradients add up in the parameters."""

    def __init__(
        self,
        loss: Loss,
        device: torch.device,
        precision: Precision = "fp32",
        couples_samples: Coupling = "micro_batch",
        *,
        reads_stored_rows: bool = False,
        empty_pass: Callable[[], None] | None = None,
    ) -> None:
        """reads_stored_rows: the loss takes `HalfPrecisionRows` where rows have 16 bits; else it is given them as
        float32.

        empty_pass: called in the place of the passes over a micro-batch without samples, where passes are collective.
        """
        self._empty_pass = empty_pass
        self._loss = loss
        self._device = device
        self.couples_samples = couples_samples
        self._reads_stored_rows = reads_stored_rows
        self._half = precision in ("bf16", "fp8") and device.type == "cuda"
        self._fp8 = precision == "fp8"
        if self._fp8:
            check_fp8(device)
        if device.type == "cuda":
            torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")

    def transfer(self, micro_batch: MicroBatch) -> MicroBatch:
        return on_device(micro_batch, self._device)

    def forward_backward(
        self, micro_batch: MicroBatch, rows: Tensors, index: Tensors, weight: float
    ) -> tuple[torch.Tensor, Tensors]:
        leaves = {name: self._leaf(row.detach()) for name, row in rows.items()}
        if _is_empty(micro_batch):
            if self._empty_pass is not None:
                self._empty_pass()
            return torch.zeros((), device=self._device), {name: _gradient(leaf) for name, leaf in leaves.items()}
        half = torch.autocast("cuda", torch.bfloat16) if self._half else contextlib.nullcontext()
        with half, fp8_products(self._fp8):
            loss = self._loss(micro_batch, cast(Tensors, leaves), index)
        loss = loss / weight
        loss.backward()
        return loss.detach(), {name: _gradient(leaf) for name, leaf in leaves.items()}

    def _leaf(self, row: torch.Tensor) -> TableRows:
        if row.dtype in HALF_TYPES and self._reads_stored_rows:
            return HalfPrecisionRows.of(row)
        return whole(row).requires_grad_()


def on_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """The same micro-batch with its tensors on `device`; copies from pinned memory do not wait."""
    if device.type == "cpu":
        return batch
    moved = {name: sent_to_device(tensor, device) for name, tensor in batch.tensors.items()}
    return replace(batch, tensors=moved)


def _is_empty(batch: MicroBatch) -> bool:
    """Whether there is nothing to compute, on this rank or on another that holds parts of its samples."""
    return (batch.num_tokens if batch.parts is None else batch.parts.num_whole_tokens) == 0


def _gradient(leaf: TableRows) -> torch.Tensor:
    source = leaf.anchor if isinstance(leaf, HalfPrecisionRows) else leaf
    return source.new_zeros(source.shape) if source.grad is None else source.grad


Vectors = dict[str, torch.Tensor]
Gradients = Mapping[str, torch.Tensor] | Mapping[torch.dtype, ConcatRows]
"""By table, or the sums of the window cache by type."""


class ExchangeWindow:
    """The exchanges of one batch: `receive` and `send` in order of micro-batch, `send(i)` after `keep(i)`."""

    def __init__(self, engine: EmbeddingEngine, routed: RoutedKeys, working: WorkingSet) -> None:
        self._engine = engine
        self.routed = routed
        self.working = working
        self._cache = _Cache(engine, routed) if routed.cache_rows is not None else None
        self._rows: dict[int, Vectors] = {}
        self._gradients: dict[int, Gradients] = {}

    def receive(self, micro_batch: int) -> None:
        """Collective."""
        into = None if self._cache is None else self._cache.vectors
        found = self._engine.exchange_vectors(self.routed, self.working, micro_batch, into)
        if into is None:
            self._rows[micro_batch] = found

    def vectors(self, micro_batch: int) -> Vectors:
        """Table to (U, dim) vectors of the micro-batch's distinct keys; once a micro-batch, after `receive(micro-
        batch)`."""
        if self._cache is not None:
            return self._cache.vectors_of(self.routed.micro_batches[micro_batch])
        rows = self._rows.pop(micro_batch)
        if self._engine.device.type != "cpu":
            used_here(rows.values())
        return rows

    def keep(self, micro_batch: int, gradients: Mapping[str, torch.Tensor]) -> None:
        """Take the gradients of `vectors(micro-batch)`; they are given away."""
        part = self.routed.micro_batches[micro_batch]
        self._gradients[micro_batch] = gradients if self._cache is None else self._cache.add(part, gradients)

    def send(self, micro_batch: int) -> None:
        """Collective."""
        gradients = self._gradients.pop(micro_batch)
        if self._engine.device.type != "cpu":
            used_for_sending(gradients)
        self._engine.send_gradients(self.routed, self.working, gradients, micro_batch)
        if micro_batch == len(self.routed.micro_batches) - 1:
            self._cache = None  # the batch itself is kept for some steps more, its largest part need not be


def used_for_sending(gradients: Gradients) -> None:
    """Gradients that one lane has made are read by another."""
    used_here(given.elements if isinstance(given, ConcatRows) else given for given in gradients.values())


class _Cache:
    """Vectors and gradient sums of the distinct keys of a rank's batch."""

    def __init__(self, engine: EmbeddingEngine, routed: RoutedKeys) -> None:
        assert routed.cache_rows is not None
        self._engine = engine
        self.vectors = vector_run(routed.cache_rows, engine.shapes, engine.device)
        self._sums = {
            dtype: gradient_run(dtype, routed.cache_rows, engine.shapes, engine.device)
            for dtype in engine.shapes.gradient_types
        }
        held = [self.vectors, *self._sums.values()]
        used = sum(run.elements.numel() * run.elements.element_size() for run in held)
        engine.statistics.window_bytes = max(engine.statistics.window_bytes, used)

    def vectors_of(self, part: RoutedMicroBatch) -> Vectors:
        assert part.used is not None
        used_here([self.vectors.elements])
        run = vector_run(part.num_rows, self._engine.shapes, self._engine.device)
        copy_rows(self.vectors, part, run)
        return vectors_of(run, self._engine.shapes, list(self._engine.tables))

    def add(self, part: RoutedMicroBatch, gradients: Mapping[str, torch.Tensor]) -> Mapping[torch.dtype, ConcatRows]:
        """Add the gradients of a micro-batch; the sums, of which those that leave are complete with it."""
        assert part.used is not None
        joined = joined_gradients(gradients, part.num_rows, self._engine.shapes, self._engine.device)
        for dtype, run in joined.items():
            sums = self._sums[dtype]
            rows = part.used[1][dtype]
            add_spans(run.elements, rows, sums.elements, sums.spans)
        used_here(run.elements for run in self._sums.values())
        return self._sums


def copy_rows(source: ConcatRows, part: RoutedMicroBatch, target: ConcatRows) -> None:
    """The distinct keys of a micro-batch out of the cache, table behind table."""
    assert part.used is not None
    packed = target.elements
    if part.used[0].num_elements != len(packed):  # tables are aligned, rows that lie packed are not
        packed = packed.new_empty(part.used[0].num_elements)
    gather_spans(source.elements, source.spans, part.used[0], packed)
    if packed is not target.elements:
        at = 0
        for t, rows in enumerate(part.num_rows.tolist()):
            size = rows * int(target.spans.widths[t])
            start = int(target.spans.starts[t])
            target.elements[start : start + size] = packed[at : at + size]
            at += size


class SplitExchangeWindow(ExchangeWindow):
    """As Window; `receive_portion` and `send_portion` each take part in both portions before `vectors` and after
    `keep`."""

    def __init__(self, engine: EmbeddingEngine, routed: RoutedKeys, working: WorkingSet) -> None:
        super().__init__(engine, routed, working)
        self._arrived: dict[int, ConcatRows] = {}

    def receive_portion(self, micro_batch: int, portion: Portion) -> None:
        """Collective."""
        into = None if self._cache is None else self._cache.vectors
        if into is None and micro_batch not in self._arrived:
            num_rows = self.routed.micro_batches[micro_batch].num_rows
            self._arrived[micro_batch] = vector_run(num_rows, self._engine.shapes, self._engine.device)
        self._engine.exchange_vectors(portion.routed, self.working, micro_batch, into or self._arrived[micro_batch])

    def vectors(self, micro_batch: int) -> Vectors:
        """Where portions have come, both of them put together."""
        if micro_batch not in self._arrived:
            return super().vectors(micro_batch)
        run = self._arrived.pop(micro_batch)
        used_here([run.elements])
        return vectors_of(run, self._engine.shapes, list(self._engine.tables))

    def send_portion(self, micro_batch: int, portion: Portion) -> None:
        """Collective; the gradients stay until the window is dropped."""
        gradients = self._gradients[micro_batch]
        used_for_sending(gradients)
        self._engine.send_gradients(portion.routed, self.working, gradients, micro_batch)
