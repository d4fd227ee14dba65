"""A time bias without buckets: an exponential-power function of the time between two events (FuXi-gamma, 2512.12740).

    b(dt) = amplitude * exp(-(dt / scale) ^ power)              dt = max(query time - key time, 1) in seconds
          = amplitude * exp(-exp(power * (ln dt - ln scale)))

As published it is alpha * gamma ^ (dt ^ power): gamma = exp(-scale ^ -power). A layer learns three numbers, shared by
its heads, as (amplitude, ln scale, ln power): scale and power stay positive whatever is learnt. Differences below a
second, and keys later than their query, count as a second, as they do in the first bucket of a table.
"""

import math

import torch
from torch import nn

NUM_SCALARS = 3
"""amplitude, ln scale, ln power"""
LARGEST_EXPONENT = 20.0
"""of power * (ln dt - ln scale): exp(-exp(20)) is 0 in every format, and a product of 0 and infinity is avoided"""
_FIRST_SCALE_S, _FIRST_POWER = 86400.0, 0.5
"""The function falls from a minute to a month before anything is learnt."""


def initial_time_function() -> nn.Parameter:
    """(3,) of a layer; the amplitude is drawn as the values of a table are."""
    amplitude = torch.empty(1).normal_(std=0.02)
    return nn.Parameter(torch.cat([amplitude, torch.tensor([math.log(_FIRST_SCALE_S), math.log(_FIRST_POWER)])]))


def log_seconds(delta_s: torch.Tensor) -> torch.Tensor:
    """ln dt: all that a layer needs to know of a time difference, float64, of any shape."""
    return delta_s.clamp(min=1.0).log()


def time_function_values(scalars: torch.Tensor, log_s: torch.Tensor) -> torch.Tensor:
    """b of `log_seconds`, of their shape, in float32 or in float64 where the scalars are."""
    amplitude, log_scale, log_power = scalars.to(torch.promote_types(scalars.dtype, torch.float32)).unbind()
    exponent = log_power.exp() * (log_s.to(amplitude.dtype) - log_scale)
    return amplitude * exponent.clamp(max=LARGEST_EXPONENT).exp().neg().exp()


def functional_time_bias(scalars: torch.Tensor, query_time_BN: torch.Tensor, time_BN: torch.Tensor) -> torch.Tensor:
    """(B, N, N) bias of the time between query i and key j; times in seconds."""
    return time_function_values(scalars, log_seconds(query_time_BN[:, :, None] - time_BN[:, None, :]))


def function_gradient(scalars: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Of the scalars, from sums over pairs of g e, g e u and g e u x: b = amplitude e, e = exp(-u), u = exp(x)."""
    amplitude, _, log_power = scalars.detach().to(sums.dtype).unbind()
    found = torch.stack([sums[0], amplitude * log_power.exp() * sums[1], -amplitude * sums[2]])
    return found.to(scalars.dtype)
