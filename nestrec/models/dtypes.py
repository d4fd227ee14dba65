"""The type that a model computes in, where it is another than it was trained in."""

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import nn

_LEARNED_OF_PAIRS = ("position_table", "time_table", "time_function")
"""Numbers of a layer about distance and time. They are few, their sums are rounded once, and the logarithm of a scale
in 16 bits would move it by some percent: they stay in 32 bits at the least."""

Model = TypeVar("Model", bound=nn.Module)


def computed_in(model: Model, dtype: torch.dtype) -> Model:
    """The same model in another type."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point():
            own = torch.promote_types(dtype, torch.float32) if name.endswith(_LEARNED_OF_PAIRS) else dtype
            tensor.data = tensor.data.to(own)
    return model


def dtype_of(weights: Mapping[str, torch.Tensor]) -> torch.dtype:
    """The type that a model of these weights computes in: that of most of them, which is the shortest."""
    return min((w.dtype for w in weights.values() if w.is_floating_point()), key=lambda dtype: dtype.itemsize)
