"""Forward and backward of a loss on looked-up rows."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal, cast

import torch

from nestrec.base.transfer import sent_to_device
from nestrec.data.batches import MicroBatch
from nestrec.ops.layers.fp8 import check_fp8, fp8_products
from nestrec.ops.rows.round import HALF_TYPES, whole
from nestrec.ops.rows.stored import StoredRows, TableRows
from nestrec.pipeline.stages import Coupling

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
        """reads_stored_rows: the loss takes `StoredRows` where rows have 16 bits; else it is given them as float32.

        empty_pass: called in the place of the passes over a micro-batch without samples, where passes are collective.
        """
        self._empty_pass = empty_pass
        self._loss, self._device, self.couples_samples = loss, device, couples_samples
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
            return StoredRows.of(row)
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
    source = leaf.anchor if isinstance(leaf, StoredRows) else leaf
    return source.new_zeros(source.shape) if source.grad is None else source.grad
