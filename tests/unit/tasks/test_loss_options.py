"""Sizes of micro-batches and the memory of losses compared with values computed by hand."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from nestrec.data.batch_loader import BatchConfig
from nestrec.distributed import Topology
from nestrec.ops.losses.sampled_losses import VARIANTS
from nestrec.tasks.loss_options import (
    LossShape,
    _fits,
    choose_variant,
    host_bytes,
    largest_micro_batch_tokens,
    loss_bytes,
    mean_micro_batch_tokens,
)

SHAPE = LossShape(
    tokens=10, negatives=3, sharing=2, rows=20, dim=8, segment_tokens=4, kind="sampled_softmax", dtype="float16"
)
VECTORS = 7 * 8 * 2
"""Bytes of the candidates of a token: one positive and 3 * 2 negatives, each of 8 numbers of 2 bytes."""


def test_micro_batch_sizes_are_counted_in_tokens() -> None:
    collator: Any = SimpleNamespace(tokens=np.array([5, 1, 4, 2]))
    samples = BatchConfig(batch_size=6)
    tokens = BatchConfig(batch_size=None, batch_tokens=7)
    assert largest_micro_batch_tokens(collator, samples, 3) == 5 + 4
    assert largest_micro_batch_tokens(collator, replace(samples, num_micro_batches=2), 3) == 5
    assert largest_micro_batch_tokens(collator, tokens, 2) == 4 + 5
    assert mean_micro_batch_tokens(collator, samples, 2) == 9
    assert mean_micro_batch_tokens(collator, replace(samples, num_micro_batches="auto"), 2) == 9
    assert mean_micro_batch_tokens(collator, replace(samples, num_micro_batches=3), 2) == 3
    assert mean_micro_batch_tokens(collator, tokens, 2) == 3
    assert mean_micro_batch_tokens(collator, tokens, 8) == 1


def test_loss_bytes_count_candidates_and_gradients() -> None:
    num_bytes = {variant: loss_bytes(variant, SHAPE) for variant in VARIANTS}
    segment = 2 * 4 * VECTORS
    assert num_bytes == {"plain": 2 * 10 * VECTORS, "segments": segment, "offload": segment, "fused": 0}
    assert loss_bytes("plain", replace(SHAPE, dtype="float32")) == 2 * num_bytes["plain"]
    assert loss_bytes("segments", replace(SHAPE, tokens=3)) == 2 * 3 * VECTORS
    assert {v: host_bytes(v, SHAPE) for v in VARIANTS if host_bytes(v, SHAPE)} == {"offload": 10 * VECTORS}


@pytest.mark.parametrize(
    ("device_bytes", "host_total", "fitting"),
    [
        (20 * VECTORS, 10 * VECTORS, {"plain", "segments", "offload", "fused"}),
        (20 * VECTORS - 1, 10 * VECTORS, {"segments", "offload", "fused"}),
        (8 * VECTORS, 10 * VECTORS - 1, {"segments", "fused"}),
        (8 * VECTORS - 1, 10 * VECTORS, {"fused"}),
    ],
)
def test_loss_fits_a_quarter_of_gpu_and_host_memory(
    monkeypatch: pytest.MonkeyPatch, device_bytes: int, host_total: int, fitting: set[str]
) -> None:
    topology = replace(Topology.single(), device=torch.device("cuda"))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=4 * host_total))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 4 * device_bytes))
    assert {v for v in VARIANTS if _fits(v, SHAPE, topology, None)} == fitting
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    assert {v for v in VARIANTS if _fits(v, SHAPE, topology, device_bytes / 2**30)} == fitting


def test_loss_on_a_cpu_fits_device_and_host_bytes_together() -> None:
    topology = Topology.single()
    offload_gib = (8 + 10) * VECTORS / 2**30
    assert _fits("offload", SHAPE, topology, offload_gib)
    assert not _fits("offload", SHAPE, topology, offload_gib * 0.999)


def test_offloaded_loss_is_timed_on_segments_and_scaled() -> None:
    tokens_of = {}

    def measure(variant: str, shape: LossShape, device: torch.device) -> float:
        tokens_of[variant] = shape.tokens
        return {"plain": 8.0, "segments": 6.0, "offload": 1.0, "fused": 7.0}[variant]

    best, milliseconds = choose_variant(replace(SHAPE, tokens=160), Topology.single(), 1.0, measure)
    assert tokens_of == {"plain": 160, "segments": 160, "offload": 16, "fused": 160}
    assert milliseconds == {"plain": 8.0, "segments": 6.0, "offload": 10.0, "fused": 7.0}
    assert best == "segments"
