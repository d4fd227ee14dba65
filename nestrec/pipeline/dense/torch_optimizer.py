"""An optimiser of torch's in the place of ours."""

from collections.abc import Mapping
from typing import Any

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
        """Take back a copy of `state`; nothing else remains."""
        self._optimizer.state.clear()
        for name, parts in state.items():
            weight = self._named[name]
            counts_on_host = not any(self._group_of(weight).get(option) for option in ("capturable", "fused"))
            self._optimizer.state[weight] = {
                part: value.clone() if part == "step" and counts_on_host else value.to(weight.device, copy=True)
                for part, value in parts.items()
            }

    def settings(self) -> dict[str, Any]:
        """What is no tensor, as JSON has it: numbers of each group, such as learning rates, and of each weight."""
        held, groups = self._optimizer.state, self._optimizer.param_groups
        numbers = {name: _plain_of(held[weight]) for name, weight in self._named.items() if weight in held}
        return {
            "kind": type(self._optimizer).__name__,
            "groups": [_settings_of(group) for group in groups],
            "of": numbers,
        }

    def load_settings(self, settings: Mapping[str, Any]) -> None:
        """Take back what `settings` gave, after `load`."""
        for group, saved in zip(self._optimizer.param_groups, settings["groups"], strict=True):
            for name, value in saved.items():
                if isinstance(group.get(name), torch.Tensor):
                    group[name].fill_(value)
                else:
                    group[name] = tuple(value) if isinstance(value, list) else value
        for name, numbers in settings["of"].items():
            self._optimizer.state[self._named[name]].update(numbers)

    def _group_of(self, weight: nn.Parameter) -> Mapping[str, Any]:
        return next(group for group in self._optimizer.param_groups if any(weight is own for own in group["params"]))


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Of weights that are updated alike; a tensor, such as the learning rate, as a number."""
    single = {n: v.item() if isinstance(v, torch.Tensor) and v.dim() == 0 else v for n, v in group.items()}
    return _plain_of({name: value for name, value in single.items() if name != "params"})


def _plain_of(held: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in held.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(isinstance(part, int | float) for part in value)
    return value is None or isinstance(value, bool | int | float)
