"""Exchange window: embedding exchanges and forward/backward of one batch, between two parameter updates.

`LossCompute` runs the forward and backward pass of a loss. `ExchangeWindow` holds the received embeddings of a batch,
and its gradients until they are sent:

    receive(i)                   all-to-all    receive the embeddings of micro-batch i
    vectors(i)                   local         return the embeddings of its unique keys, in the order of its index
    store_gradients(i, grads)    local         store their gradients
    send(i)                      all-to-all    send the gradients to the owners of the rows, which sum them

Without the window cache, micro-batches are independent. With the window cache, a received embedding is stored for later
micro-batches that use it, too, and its gradients are summed here, in the order of micro-batches, until the last use of
the key; so each key is exchanged once per batch.

`SplitExchangeWindow` exchanges the rows of a micro-batch in two portions, exclusive and shared rows (see
`collision_stages`).
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal, cast

import torch

from nestrec.base.cuda import copy_to_device, record_stream_use
from nestrec.data.batch_loader import MicroBatch
from nestrec.embedding import EmbeddingEngine, RoutedKeys, WorkingSet
from nestrec.embedding.routing.batch_overlap import Portion
from nestrec.embedding.routing.key_routing import RoutedMicroBatch
from nestrec.embedding.routing.row_exchange import (
    ConcatRows,
    allocate_gradients,
    allocate_vectors,
    concat_gradients,
    vectors_of,
)
from nestrec.ops.embedding.row_copy import add_spans, gather_spans
from nestrec.ops.embedding.row_gather import HalfPrecisionRows, TableRows
from nestrec.ops.embedding.stochastic_rounding import HALF_TYPES, to_float32
from nestrec.ops.layers.fp8 import check_fp8, fp8_enabled

Coupling = Literal["micro_batch", "batch"]


"""Samples on which the loss of a sample may depend: those of its micro-batch, or all samples of a rank's batch."""


Precision = Literal["fp32", "tf32", "bf16", "fp8"]
Tensors = Mapping[str, torch.Tensor]
Loss = Callable[[MicroBatch, Tensors, Tensors], torch.Tensor]
"""Function from (micro-batch on the device; (U, D) unique rows per table; per feature, the indices of its keys in the
rows of its table) to the sum of the losses."""


class LossCompute:
    """Runs the forward and backward pass of a loss on the device.

    The caller owns the rows. Gradients of dense weights accumulate in the parameters over micro-batches (gradient
    accumulation of sums, not means).

    Args:
        loss: Function that computes the sum of the losses of a micro-batch.
        device: Device of the computation.
        precision: Precision of matrix products.
        couples_samples: Samples on which the loss of a sample may depend.
        reads_stored_rows: Whether the loss accepts `HalfPrecisionRows` for 16-bit tables; otherwise it gets their rows
            converted to float32.
        empty_pass: Function to call instead of the passes over a micro-batch without samples, if passes are collective
            (FSDP).
    """

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
        with half, fp8_enabled(self._fp8):
            loss = self._loss(micro_batch, cast(Tensors, leaves), index)
        loss = loss / weight
        loss.backward()
        return loss.detach(), {name: _gradient(leaf) for name, leaf in leaves.items()}

    def _leaf(self, row: torch.Tensor) -> TableRows:
        if row.dtype in HALF_TYPES and self._reads_stored_rows:
            return HalfPrecisionRows.of(row)
        return to_float32(row).requires_grad_()


def on_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """Return the micro-batch with its tensors on `device`; copies from pinned memory are asynchronous."""
    if device.type == "cpu":
        return batch
    moved = {name: copy_to_device(tensor, device) for name, tensor in batch.tensors.items()}
    return replace(batch, tensors=moved)


def _is_empty(batch: MicroBatch) -> bool:
    """Return whether there are no tokens, on this rank and on the other ranks of its context-parallel group."""
    return (batch.num_tokens if batch.token_partition is None else batch.token_partition.num_total_tokens) == 0


def _gradient(leaf: TableRows) -> torch.Tensor:
    source = leaf.anchor if isinstance(leaf, HalfPrecisionRows) else leaf
    return source.new_zeros(source.shape) if source.grad is None else source.grad


Vectors = dict[str, torch.Tensor]
Gradients = Mapping[str, torch.Tensor] | Mapping[torch.dtype, ConcatRows]
"""Gradients by table, or the gradient sums of the window cache by dtype."""


class ExchangeWindow:
    """Embedding and gradient exchanges of one batch.

    `receive` and `send` must be called in the order of micro-batches, and `send(i)` after `store_gradients(i, ...)`.
    """

    def __init__(self, engine: EmbeddingEngine, routed: RoutedKeys, working: WorkingSet) -> None:
        self._engine = engine
        self.routed = routed
        self.working = working
        self._cache = _Cache(engine, routed) if routed.num_cache_rows is not None else None
        self._rows: dict[int, Vectors] = {}
        self._gradients: dict[int, Gradients] = {}

    def receive(self, micro_batch: int) -> None:
        """Receive the embeddings of a micro-batch. Collective."""
        into = None if self._cache is None else self._cache.vectors
        received = self._engine.exchange_vectors(self.routed, self.working, micro_batch, into)
        if into is None:
            self._rows[micro_batch] = received

    def vectors(self, micro_batch: int) -> Vectors:
        """Return the (U, dim) embeddings of the unique keys of a micro-batch, by table.

        Call it once per micro-batch, after `receive(micro_batch)`.
        """
        if self._cache is not None:
            return self._cache.vectors_of(self.routed.micro_batches[micro_batch])
        rows = self._rows.pop(micro_batch)
        if self._engine.device.type != "cpu":
            record_stream_use(rows.values())
        return rows

    def store_gradients(self, micro_batch: int, gradients: Mapping[str, torch.Tensor]) -> None:
        """Store the gradients of `vectors(micro_batch)`; the caller must not use them afterwards."""
        part = self.routed.micro_batches[micro_batch]
        self._gradients[micro_batch] = gradients if self._cache is None else self._cache.add(part, gradients)

    def send(self, micro_batch: int) -> None:
        """Send the gradients of a micro-batch to the owners of the rows. Collective."""
        gradients = self._gradients.pop(micro_batch)
        if self._engine.device.type != "cpu":
            record_send_stream(gradients)
        self._engine.send_gradients(self.routed, self.working, gradients, micro_batch)
        if micro_batch == len(self.routed.micro_batches) - 1:
            self._cache = None  # the batch is referenced for some more steps; free its largest part now


def record_send_stream(gradients: Gradients) -> None:
    """Record for the CUDA allocator that the current stream reads gradients that another stream has computed."""
    record_stream_use(
        gradient.elements if isinstance(gradient, ConcatRows) else gradient for gradient in gradients.values()
    )


class _Cache:
    """Window cache: embeddings and gradient sums of the unique keys of a rank's batch."""

    def __init__(self, engine: EmbeddingEngine, routed: RoutedKeys) -> None:
        assert routed.num_cache_rows is not None
        self._engine = engine
        self.vectors = allocate_vectors(routed.num_cache_rows, engine.shapes, engine.device)
        self._sums = {
            dtype: allocate_gradients(dtype, routed.num_cache_rows, engine.shapes, engine.device)
            for dtype in engine.shapes.gradient_types
        }
        buffers = [self.vectors, *self._sums.values()]
        num_bytes = sum(rows.elements.numel() * rows.elements.element_size() for rows in buffers)
        engine.statistics.window_bytes = max(engine.statistics.window_bytes, num_bytes)

    def vectors_of(self, part: RoutedMicroBatch) -> Vectors:
        assert part.cached_rows is not None
        record_stream_use([self.vectors.elements])
        rows = allocate_vectors(part.num_rows, self._engine.shapes, self._engine.device)
        copy_rows(self.vectors, part, rows)
        return vectors_of(rows, self._engine.shapes, list(self._engine.tables))

    def add(self, part: RoutedMicroBatch, gradients: Mapping[str, torch.Tensor]) -> Mapping[torch.dtype, ConcatRows]:
        """Add the gradients of a micro-batch and return the sums; those that this micro-batch sends are complete."""
        assert part.cached_rows is not None
        by_dtype = concat_gradients(gradients, part.num_rows, self._engine.shapes, self._engine.device)
        for dtype, gradient in by_dtype.items():
            sums = self._sums[dtype]
            rows = part.cached_rows[1][dtype]
            add_spans(gradient.elements, rows, sums.elements, sums.spans)
        record_stream_use(sums.elements for sums in self._sums.values())
        return self._sums


def copy_rows(source: ConcatRows, part: RoutedMicroBatch, target: ConcatRows) -> None:
    """Copy the rows of a micro-batch's unique keys from the window cache, concatenated by table."""
    assert part.cached_rows is not None
    packed = target.elements
    if part.cached_rows[0].num_elements != len(packed):  # tables in `target` are aligned; gathered rows are packed
        packed = packed.new_empty(part.cached_rows[0].num_elements)
    gather_spans(source.elements, source.spans, part.cached_rows[0], packed)
    if packed is not target.elements:
        at = 0
        for t, rows in enumerate(part.num_rows.tolist()):
            size = rows * int(target.spans.widths[t])
            start = int(target.spans.starts[t])
            target.elements[start : start + size] = packed[at : at + size]
            at += size


class SplitExchangeWindow(ExchangeWindow):
    """Exchange window whose exchanges are split into two portions.

    `receive_portion` must be called for both portions before `vectors`, and `send_portion` for both portions after
    `store_gradients`.
    """

    def __init__(self, engine: EmbeddingEngine, routed: RoutedKeys, working: WorkingSet) -> None:
        super().__init__(engine, routed, working)
        self._arrived: dict[int, ConcatRows] = {}

    def receive_portion(self, micro_batch: int, portion: Portion) -> None:
        """Receive the embeddings of one portion of a micro-batch. Collective."""
        into = None if self._cache is None else self._cache.vectors
        if into is None and micro_batch not in self._arrived:
            num_rows = self.routed.micro_batches[micro_batch].num_rows
            self._arrived[micro_batch] = allocate_vectors(num_rows, self._engine.shapes, self._engine.device)
        self._engine.exchange_vectors(portion.routed, self.working, micro_batch, into or self._arrived[micro_batch])

    def vectors(self, micro_batch: int) -> Vectors:
        """Return the embeddings of a micro-batch, of both portions if it was received in portions."""
        if micro_batch not in self._arrived:
            return super().vectors(micro_batch)
        rows = self._arrived.pop(micro_batch)
        record_stream_use([rows.elements])
        return vectors_of(rows, self._engine.shapes, list(self._engine.tables))

    def send_portion(self, micro_batch: int, portion: Portion) -> None:
        """Send the gradients of one portion. Collective. The gradients are freed with the window."""
        gradients = self._gradients[micro_batch]
        record_send_stream(gradients)
        self._engine.send_gradients(portion.routed, self.working, gradients, micro_batch)
