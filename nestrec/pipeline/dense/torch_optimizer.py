"""An optimiser of torch's in the place of ours."""

from collections.abc import Mapping

import torch
from torch import nn


class TorchOptimizer:
    """Wraps a `torch.optim.Optimizer` over the weights of a model; its learning rates are its own."""

    def __init__(self, named: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        self._named, self._optimizer = named, optimizer

    @property
    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """By name of the weight, what the optimiser keeps of it in tensors."""
        held = self._optimizer.state
        return {
            name: {part: value for part, value in held[weight].items() if isinstance(value, torch.Tensor)}
            for name, weight in self._named.items()
            if weight in held
        }

    def step(self, learning_rate: float) -> None:
        """One update. `learning_rate` belongs to our own optimiser and is not looked at."""
        self._optimizer.step()

    def clear_gradients(self) -> None:
        for weight in self._named.values():
            weight.grad = None

    def load(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Take back a copy of `state`."""
        for name, parts in state.items():
            self._optimizer.state[self._named[name]] |= {part: value.clone() for part, value in parts.items()}
