"""Measure the peak memory of forward and backward passes, jagged against padded, with equal models and valid tokens.

impl               tokens                  attention
jagged             valid tokens            kernels
jagged recompute   valid tokens            kernels; norms, activations and gates are recomputed
padded kernels     padded to the longest   kernels
padded torch       padded to the longest   plain torch operators on (sequences, heads, N, N) blocks

The last one is plain PyTorch, with which TurboGR compares (47.77 GB against 14.31 GB).
"""

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.models import HSTU, HSTUConfig, SequenceInfo
from nestrec.models.hstu import HSTULayer
from nestrec_bench.kernels.layer_bench import eager_layer, info_of

SHARES = (1.0, 0.5, 1 / 3, 1 / 6)
"""Lengths as fractions of the longest: half of a padded batch is padding, as TurboGR reports for its data."""


def measure_memory(cfg: HSTUConfig, device: str) -> Iterator[dict[str, Any]]:
    """Yield one row per implementation; `cfg.max_length` is the longest length."""
    lengths = np.array([round(share * cfg.max_length) for share in SHARES])
    padded = np.full_like(lengths, cfg.max_length)
    runs = {
        "jagged": (cfg, lengths),
        "jagged recompute": (replace(cfg, activation_checkpointing=True), lengths),
        "padded kernels": (cfg, padded),
        "padded torch": (cfg, padded),
    }
    for impl, (own, own_lengths) in runs.items():
        row = {
            "model": f"hstu-{cfg.num_heads}x{cfg.head_dim}",
            "impl": impl,
            "longest": cfg.max_length,
            "valid_tokens": int(lengths.sum()),
            "computed_tokens": int(own_lengths.sum()),
        }
        try:
            row["peak_gib"] = round(_peak_bytes(own, own_lengths, device, plain=impl == "padded torch") / 2**30, 2)
        except torch.OutOfMemoryError:
            row["error"] = "out of memory"
        yield row


def _peak_bytes(cfg: HSTUConfig, lengths: NDArray[np.int64], device: str, *, plain: bool) -> int:
    """Measure the peak of the newly allocated bytes, including weights and gradients."""
    before = _allocated(device)
    torch.manual_seed(0)
    model = HSTU(cfg).to(device)
    info = info_of(lengths, device)
    x = torch.randn(int(lengths.sum()), cfg.dim, device=device)
    dtype = torch.bfloat16
    with torch.autocast(device, dtype, enabled=device == "cuda"):
        out = _plain_forward(model, x, info) if plain else model(x, info)
    out.float().square().mean().backward()
    return int(torch.cuda.max_memory_allocated()) - before if device == "cuda" else 0


def _allocated(device: str) -> int:
    """Reset the peak statistics and return the allocated bytes."""
    if device != "cuda":
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return int(torch.cuda.memory_allocated())


def _plain_forward(model: HSTU, x: torch.Tensor, info: SequenceInfo) -> torch.Tensor:
    if x.is_cuda:
        x = x.to(torch.bfloat16)
    for layer in model.layers:
        assert isinstance(layer, HSTULayer)
        x = eager_layer(layer, x, info)
    return x
