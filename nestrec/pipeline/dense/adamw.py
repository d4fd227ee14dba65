"""AdamW over named weights: torch's own update, without its Optimizer class.

Making a `torch.optim.Optimizer` imports the whole compiler of torch (and triton with it): as long again as importing
torch itself, in every process that trains, measures or exports.
"""

from collections.abc import Mapping

import torch
from torch import nn
from torch.optim.adamw import adamw

from nestrec.pipeline.dense.options import OptimizerConfig

STATE = ("step", "exp_avg", "exp_avg_sq")


class AdamW:
    """Weights with their moments and step counts. On a GPU one kernel updates all, elsewhere lists of tensors."""

    def __init__(self, named: Mapping[str, nn.Parameter], cfg: OptimizerConfig, device: torch.device):
        self._named, self._cfg, self._is_fused = named, cfg, device.type == "cuda"
        self.state: dict[str, dict[str, torch.Tensor]] = {}
        """by name of the weight: what STATE names; empty before the first step"""

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """One update with the gradients that are there; weights without one stay as they are."""
        gradients = {name: weight.grad for name, weight in self._named.items() if weight.grad is not None}
        for name in gradients:
            if name not in self.state:
                self.state[name] = self._begin(self._named[name])
        names = list(gradients)
        weights: list[torch.Tensor] = [self._named[name] for name in names]
        steps, means, squares = ([self.state[name][part] for name in names] for part in STATE)
        adamw(
            weights, list(gradients.values()), means, squares, [], steps, foreach=not self._is_fused,
            fused=self._is_fused, amsgrad=False, beta1=self._cfg.beta1, beta2=self._cfg.beta2, lr=learning_rate,
            weight_decay=self._cfg.weight_decay, eps=self._cfg.eps, maximize=False,
        )  # fmt: skip

    def clear_gradients(self) -> None:
        for weight in self._named.values():
            weight.grad = None

    def load(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Take back a copy of `state`."""
        self.state = {
            name: {part: value.to(self._device_of(part, self._named[name])) for part, value in parts.items()}
            for name, parts in state.items()
        }

    def _begin(self, weight: nn.Parameter) -> dict[str, torch.Tensor]:
        precise = torch.float32 if self._is_fused else torch.get_default_dtype()
        step = torch.zeros((), dtype=precise, device=self._device_of("step", weight))
        return {"step": step, "exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}

    def _device_of(self, part: str, weight: nn.Parameter) -> torch.device:
        """Step counts stay on the host, except where one kernel updates everything."""
        return torch.device("cpu") if part == "step" and not self._is_fused else weight.device
