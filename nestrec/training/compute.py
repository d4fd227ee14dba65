"""Forward and backward of a task's model on looked-up rows."""

import contextlib
from collections.abc import Mapping
from typing import Literal

import torch

from nestrec.data.batches import MicroBatch
from nestrec.pipeline import Coupling
from nestrec.tasks.task import Task, on_device


class ModelCompute:
    """Runs a task's loss on the device. The caller owns the rows; dense gradients add up in the parameters."""

    def __init__(self, task: Task, device: torch.device, precision: Literal["fp32", "tf32", "bf16"]):
        self._task, self._device = task, device
        self._half = precision == "bf16" and device.type == "cuda"
        if device.type == "cuda":
            torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")

    @property
    def couples_samples(self) -> Coupling:
        return self._task.couples_samples

    def transfer(self, part: MicroBatch) -> MicroBatch:
        return on_device(part, self._device)

    def forward_backward(
        self, part: MicroBatch, rows: Mapping[str, torch.Tensor], index: Mapping[str, torch.Tensor], weight: float
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        leaves = {name: row.detach().requires_grad_() for name, row in rows.items()}
        if part.num_tokens == 0:
            return torch.zeros((), device=self._device), {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
        with torch.autocast("cuda", torch.bfloat16) if self._half else contextlib.nullcontext():
            loss = self._task.loss(part, leaves, index)
        loss = loss / weight
        loss.backward()
        return loss.detach(), {name: _gradient(leaf) for name, leaf in leaves.items()}


def _gradient(leaf: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
