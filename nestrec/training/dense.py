"""The dense side of an update: gradients summed over ranks, then AdamW."""

from collections.abc import Mapping

import torch
from torch import nn

from nestrec.base.errors import UserError
from nestrec.distributed import Topology
from nestrec.distributed.dense_sync import DenseSync
from nestrec.distributed.exchange import all_reduce_sum
from nestrec.pipeline import Totals
from nestrec.training.config import OptimizerConfig


class DenseUpdate:
    """Dense weights, their optimiser and their synchronisation."""

    def __init__(self, model: nn.Module, cfg: OptimizerConfig, topology: Topology, device: torch.device):
        self._named = dict(model.named_parameters())
        self._device, self._topology = device, topology
        self._optimizer = torch.optim.AdamW(
            self._named.values(), lr=cfg.learning_rate, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps,
            weight_decay=cfg.weight_decay, foreach=device.type != "cuda", fused=device.type == "cuda",
        )  # fmt: skip
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
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return Totals(loss=sums[0], gradient_norm=norm, wants_stop=sums[1])

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights and optimiser state by name."""
        found = {f"model/{name}": p.detach() for name, p in self._named.items()}
        for name, parameter in self._named.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                found[f"optimizer/{name}/{key}"] = value
        return found

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take back what `tensors` gave."""
        _check_same_model(self._named, tensors)
        with torch.no_grad():
            for name, parameter in self._named.items():
                parameter.copy_(tensors[f"model/{name}"])
        for name, parameter in self._named.items():
            prefix = f"optimizer/{name}/"
            keys = [key for key in tensors if key.startswith(prefix)]
            if keys:
                # AdamW keeps its step counts on the host, except where one kernel updates everything.
                self._optimizer.state[parameter] = {
                    key.removeprefix(prefix): tensors[key].to(
                        "cpu" if key.endswith("/step") and self._device.type != "cuda" else parameter.device
                    )
                    for key in keys
                }


def _check_same_model(named: Mapping[str, nn.Parameter], tensors: Mapping[str, torch.Tensor]) -> None:
    saved = {name.removeprefix("model/"): list(tensors[name].shape) for name in tensors if name.startswith("model/")}
    wanted = {name: list(parameter.shape) for name, parameter in named.items()}
    for name in sorted(saved.keys() | wanted.keys()):
        if saved.get(name) != wanted.get(name):
            raise UserError(
                f"the checkpoint is of another model: it has {saved.get(name)}", field=f"shape of {name}",
                value=wanted.get(name), remedy="train into another folder (--output), or with its config.json",
            )  # fmt: skip
