"""`nestrec bench negatives`: memory and time of whole training steps, by the number of negatives and how they are kept.

Steps are those of `nestrec bench step` (tables, schedule, model, loss, both optimisers), on sequences of one length.
Memory of negatives is the peak above that of the same step without negatives. Published figures are TurboGR's of
FuXi-large on another kind of device, without and with its offload: only their ratios can be compared.
"""

import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from nestrec.base.config import config
from nestrec.bench.step import NUM_BATCHES, StepRunner
from nestrec.bench.step_data import write_step_data
from nestrec.data.retrieval import HistoryConfig
from nestrec.embedding import RowOptimizerConfig
from nestrec.models import HSTUConfig
from nestrec.models.negatives import NegativesConfig
from nestrec.ops.sampled_losses import VARIANTS, Variant
from nestrec.pipeline import PipelineConfig
from nestrec.training.config import DataConfig, RunConfig, TrainingConfig
from nestrec.training.tasks.retrieval import RetrievalTask, RetrievalTaskConfig

PUBLISHED_GB = {32: (22.21, 17.42), 64: (31.64, 23.44), 128: (50.39, 34.27)}
"""TurboGR, Table 7: device memory with the negatives' vectors on the device, and offloaded."""
BUS_BYTES_PER_S = 55e9
"""PCIe 5 x16, as measured copies reach it"""


@config
class NegativesBench:
    """What is measured."""

    negatives: tuple[int, ...] = (32, 64, 128, 256)
    """of a token; a step without any is measured first"""
    variants: tuple[Variant, ...] = VARIANTS
    """how the loss is computed"""
    lookups: tuple[Literal["full", "float16", "bfloat16"], ...] = ("full",)
    """types in which rows that are only negatives are looked up"""
    sharing: int = 1
    """tokens whose negatives one meets"""
    batch: int = 6
    """sequences of a step"""
    length: int = 2048
    """tokens of a sequence"""
    num_layers: int = 16
    """of HSTU"""
    dim: int = 1024
    """width of the model and of the rows, which are float32"""
    num_heads: int = 4
    """attention heads; a head is as wide as leaves the model its width"""
    num_items: int = 131_072
    """rows of the item table, drawn uniformly"""
    segment_tokens: int = 512
    """tokens whose vectors are in memory at a time"""
    schedule: Literal["serial", "dual_buffer"] = "serial"
    """how lookup and compute share the time"""
    precision: Literal["tf32", "bf16", "fp32"] = "tf32"
    """of dense products; TurboGR trains in TF32"""
    device: Literal["cuda", "cpu"] = "cuda"
    """a CPU measures no memory; it is for tests"""
    warm_up: int = 3
    """steps that are not timed"""
    steps: int = 5
    """timed steps"""


def measure_negatives(bench: NegativesBench) -> Iterator[dict[str, Any]]:
    """A row without negatives, then one for each number, lookup and variant."""
    lengths = np.full(bench.batch, bench.length)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        write_step_data(data, lengths, num_batches=NUM_BATCHES, num_items=bench.num_items, zipf=0.75)
        base = next(_of_number(bench, data, 0, "full", (bench.variants[0],)))
        yield {**base, "variant": "none"}
        for number in bench.negatives:
            for lookup in bench.lookups:
                plain: dict[str, Any] = {}
                for row in _of_number(bench, data, number, lookup, bench.variants):
                    plain = row if row["variant"] == "plain" else plain
                    yield row | _compared(row, base, plain) | _beside(bench, row)


def _of_number(
    bench: NegativesBench, data: Path, number: int, lookup: Literal["full", "float16", "bfloat16"],
    variants: tuple[Variant, ...],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    runner = StepRunner(_run_config(bench, data, number, lookup), bench.batch)
    task, statistics = runner.session.task, runner.session.engine.statistics
    assert isinstance(task, RetrievalTask)
    try:
        for variant in variants:
            task.variant = variant
            for _ in range(bench.warm_up):
                runner.step()
            runner.wait()
            _reset_peak(bench.device)
            before = statistics.vector_bytes
            seconds = runner.seconds(bench.steps)
            yield {
                "variant": variant, "negatives": number, "lookup": lookup, "sharing": bench.sharing,
                "peak_gib": _peak_gib(bench.device), "step_ms": round(1e3 * seconds, 2),
                "looked_up_bytes": (statistics.vector_bytes - before) // bench.steps,
                "loss": round(float(runner.step()), 4), "precision": bench.precision, "items": bench.num_items,
            }  # fmt: skip
    finally:
        runner.close()
        del runner
        gc.collect()
        if bench.device == "cuda":
            torch.cuda.empty_cache()


def _run_config(
    bench: NegativesBench, data: Path, number: int, lookup: Literal["full", "float16", "bfloat16"]
) -> RunConfig:
    encoder = HSTUConfig(
        dim=bench.dim, num_layers=bench.num_layers, num_heads=bench.num_heads, head_dim=bench.dim // bench.num_heads,
        max_length=bench.length, position_bias=False,
    )  # fmt: skip
    negatives = NegativesConfig(sharing=bench.sharing, segment_tokens=bench.segment_tokens, lookup=lookup)
    return RunConfig(
        name="negatives",
        task=RetrievalTaskConfig(
            encoder=encoder, history=HistoryConfig(max_length=bench.length), num_negatives=number, negatives=negatives,
            item_optimizer=RowOptimizerConfig(kind="rowwise_adagrad"),
        ),
        data=DataConfig(folder=str(data)),
        pipeline=PipelineConfig(schedule=bench.schedule),
        training=TrainingConfig(precision=bench.precision, device=bench.device),
    )  # fmt: skip


def _compared(row: dict[str, Any], base: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """Beside the plain variant of the same number: memory of negatives saved, peak saved, and time."""
    if not plain or plain["peak_gib"] <= base["peak_gib"]:
        return {}
    cost, whole = row["peak_gib"] - base["peak_gib"], plain["peak_gib"] - base["peak_gib"]
    return {
        "negatives_gib": round(cost, 2),
        "saved_of_negatives": round(1 - cost / whole, 4),
        "saved_of_peak": round(1 - row["peak_gib"] / plain["peak_gib"], 4),
        "time_of_plain": round(row["step_ms"] / plain["step_ms"], 4),
    }


def _beside(bench: NegativesBench, row: dict[str, Any]) -> dict[str, Any]:
    """Published memory, and the least time of what offload moves."""
    found: dict[str, Any] = {}
    published = PUBLISHED_GB.get(row["negatives"])
    if published is not None and row["variant"] in ("plain", "offload"):
        found["turbogr_gb"] = published[row["variant"] == "offload"]
    if row["variant"] == "offload":
        moved = 2 * bench.batch * bench.length * (1 + row["negatives"] * bench.sharing) * bench.dim * 4
        found["bus_floor_ms"] = round(1e3 * moved / BUS_BYTES_PER_S, 2)
    return found


def _reset_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def _peak_gib(device: str) -> float:
    return round(torch.cuda.max_memory_allocated() / 2**30, 3) if device == "cuda" else 0.0
