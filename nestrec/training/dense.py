"""The dense side of an update: gradients summed over ranks, then AdamW."""

from collections.abc import Mapping

import torch
from torch import nn

from nestrec.base.errors import UserError
from nestrec.distributed import Topology
from nestrec.distributed.dense_sync import DenseSync
from nestrec.distributed.exchange import all_reduce_sum
from nestrec.pipeline import Totals
from nestrec.training.adamw import STATE, AdamW
from nestrec.training.config import OptimizerConfig


class DenseUpdate:
    """Dense weights, their optimiser and their synchronisation."""

    def __init__(self, model: nn.Module, cfg: OptimizerConfig, topology: Topology, device: torch.device):
        self._named = dict(model.named_parameters())
        self._device, self._topology = device, topology
        self._optimizer = AdamW(self._named, cfg, device)
        self._sync = DenseSync(list(self._named.values()), topology.dense)

    def reduce(self, loss: torch.Tensor, wants_stop: bool) -> torch.Tensor:
        """Sum gradients over ranks in place, and (loss, wish to stop). Collective."""
        # A fill and not a copy: the host would wait for the device to take a number from pageable memory.
        wish = torch.full((), float(wants_stop), device=self._device, dtype=torch.float64)
        sums = torch.stack([loss.double(), wish])
        for parameter in self._named.values():
            if parameter.grad is None:  # no sample reached it here; one rank must do as many do
                parameter.grad = torch.zeros_like(parameter)
        self._sync.reduce()
        all_reduce_sum(self._topology.dense, sums)
        return sums

    def apply(self, sums: torch.Tensor, learning_rate: float) -> Totals:
        """Update once with what `reduce` has summed, and clear the gradients."""
        norm = nn.utils.get_total_norm([p.grad for p in self._named.values() if p.grad is not None])
        self._optimizer.step(learning_rate)
        self._optimizer.clear_gradients()
        return Totals(loss=sums[0], gradient_norm=norm, wants_stop=sums[1])

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights and optimiser state by name."""
        found = {f"model/{name}": p.detach() for name, p in self._named.items()}
        for name, state in self._optimizer.state.items():
            found |= {f"optimizer/{name}/{part}": value for part, value in state.items()}
        return found

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take back what `tensors` gave."""
        _check_same_model(self._named, tensors)
        with torch.no_grad():
            for name, parameter in self._named.items():
                parameter.copy_(tensors[f"model/{name}"])
        saved = {name: {part: tensors.get(f"optimizer/{name}/{part}") for part in STATE} for name in self._named}
        self._optimizer.load(
            {
                name: {part: value for part, value in state.items() if value is not None}
                for name, state in saved.items()
                if any(value is not None for value in state.values())
            }
        )


def _check_same_model(named: Mapping[str, nn.Parameter], tensors: Mapping[str, torch.Tensor]) -> None:
    saved = {name.removeprefix("model/"): list(tensors[name].shape) for name in tensors if name.startswith("model/")}
    wanted = {name: list(parameter.shape) for name, parameter in named.items()}
    for name in sorted(saved.keys() | wanted.keys()):
        if saved.get(name) != wanted.get(name):
            raise UserError(
                f"the checkpoint is of another model: it has {saved.get(name)}", field=f"shape of {name}",
                value=wanted.get(name), remedy="train into another folder (--output), or with its config.json",
            )  # fmt: skip
