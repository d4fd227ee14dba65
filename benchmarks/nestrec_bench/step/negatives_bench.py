"""Measure memory and time of training steps, by the number of negatives and the variant of the loss.

Steps are those of `nestrec bench step` (tables, schedule, model, loss, both optimizers), with sequences of equal
length. The memory of negatives is the difference between the peak and that of the same step without negatives;
`loss_ms` is forward and backward of the loss alone, on random float32 rows. Published figures are those of TurboGR for
FuXi-large on another kind of device, without and with offloading, so only their ratios can be compared.

    nestrec bench negatives --negatives 32,128 --variants plain,fused --precision bf16
"""

import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from nestrec.base.config import config
from nestrec.base.random import fold_array
from nestrec.data.samples.negative_sampling import uniform_negatives
from nestrec.data.samples.retrieval_collator import HistoryConfig
from nestrec.distributed import Topology
from nestrec.distributed.topology import check_device
from nestrec.embedding import EmbeddingEngine, RowOptimizerConfig, TableConfig
from nestrec.models import HSTUConfig
from nestrec.models.heads import NegativesConfig, SimilarityConfig
from nestrec.ops.losses.sampled_losses import VARIANTS, Variant
from nestrec.pipeline import PipelineConfig
from nestrec.tasks.loss_options import LossShape, loss_milliseconds
from nestrec.tasks.retrieval_task import RetrievalTask, RetrievalTaskConfig
from nestrec.tasks.table_overrides import TableOverrides
from nestrec.training.run_config import DataConfig, RunConfig, TrainingConfig
from nestrec_bench.bench import Bench
from nestrec_bench.harness.local_ranks import run_on_ranks
from nestrec_bench.step.step_bench import NUM_BATCHES, StepRunner, write_step_data

Lookup = Literal["full", "float16", "bfloat16"]
LOOKUPS: tuple[Lookup, ...] = ("full", "float16")


def measure_bytes(
    ranks: int, tokens: int, dim: int, num_items: int, negatives: tuple[int, ...]
) -> Iterator[dict[str, Any]]:
    """Yield one row of byte counts per number of negatives and data type; `tokens` is their number per rank."""
    counted = run_on_ranks(ranks, count_all, (tokens, dim, num_items), negatives)
    total = {case: np.sum([rank[case] for rank in counted], axis=0) for case in counted[0]}
    for number in negatives:
        full = total[number, "full"] - total[0, "full"]
        for lookup in LOOKUPS:
            own = total[number, lookup] - total[0, lookup]
            yield {
                "variant": "bytes",
                "negatives": number,
                "lookup": lookup,
                "ranks": ranks,
                "items": num_items,
                "dim": dim,
                "tokens": tokens,
                "looked_up_bytes": int(own[0]),
                "sent_bytes": int(own[1]),
                "of_full": [round(share, 4) for share in (own / full).tolist()],
            }


def count_all(
    topology: Topology, shape: tuple[int, int, int], negatives: tuple[int, ...]
) -> dict[tuple[int, Lookup], tuple[int, int]]:
    """Return the bytes of one rank by (number of negatives, data type), also for 0 negatives."""
    return {(n, lookup): count_bytes(topology, shape, n, lookup) for n in (0, *negatives) for lookup in LOOKUPS}


def count_bytes(topology: Topology, shape: tuple[int, int, int], negatives: int, lookup: Lookup) -> tuple[int, int]:
    """Return the bytes of vectors in one step that this rank's shard looks up, and that it sends to others."""
    tokens, dim, num_items = shape
    half: dict[str, Any] = {} if lookup == "full" else {"half_precision_features": ("negative",), "half_dtype": lookup}
    features = ("history", "negative")
    table = TableConfig(name="items", dim=dim, num_rows=num_items + 1, features=features, **half)
    engine = EmbeddingEngine([table], topology)
    key_T = fold_array(topology.rank, np.arange(tokens))
    keys = {
        "history": 1 + (fold_array(key_T, key_T) % np.uint64(num_items)).astype(np.int64),
        "negative": uniform_negatives(key_T, negatives, num_items),
    }
    routed = engine.route(keys)
    engine.exchange_vectors(routed, engine.fetch_rows(routed, step=1))
    return engine.statistics.vector_bytes, engine.statistics.vectors.bytes_sent


PUBLISHED_GB = {32: (22.21, 17.42), 64: (31.64, 23.44), 128: (50.39, 34.27)}
"""TurboGR, Table 7: device memory with the negatives' vectors on the device, and with offloaded vectors."""
BUS_BYTES_PER_S = 55e9
"""Bandwidth of PCIe 5 x16 in measured copies."""


@config
class NegativesBenchConfig:
    """Options of the negatives benchmark."""

    negatives: tuple[int, ...] = (32, 64, 128, 256)
    """Numbers of negatives per token; a step without negatives is measured first."""
    variants: tuple[Variant, ...] = VARIANTS
    """Variants of the loss computation."""
    lookups: tuple[Lookup, ...] = ("full",)
    """Data types in which rows are looked up that are used as negatives only."""
    rows: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type of the rows of the item table."""
    sharing: int = 1
    """Number of tokens that share their negatives (logit sharing)."""
    batch: int = 6
    """Number of sequences per step."""
    length: int = 2048
    """Number of tokens per sequence."""
    num_layers: int = 16
    """Number of layers of HSTU."""
    dim: int = 1024
    """Width of the model and of the rows."""
    num_heads: int = 4
    """Number of attention heads; the width of a head is `dim` divided by it."""
    num_items: int = 131_072
    """Number of rows of the item table, from which negatives are drawn uniformly."""
    segment_tokens: int = 512
    """Number of tokens whose vectors are in memory at the same time."""
    schedule: Literal["serial", "dual_buffer"] = "dual_buffer"
    """Pipeline schedule."""
    precision: Literal["tf32", "bf16", "fp32"] = "bf16"
    """Precision of dense matrix products on a GPU."""
    device: Literal["cuda", "cpu"] = "cuda"
    """Device. Memory is not measured on a CPU, which is for tests."""
    warm_up: int = 3
    """Number of steps before the timed ones."""
    steps: int = 5
    """Number of timed steps."""
    rounds: int = 3
    """Number of turns of each variant; the row contains the median of their times, so that other load on the host
    affects all variants equally."""
    ranks: int = 0
    """Number of CPU ranks that count the bytes that they transfer, without timing. 0: one device is timed."""


def measure_negatives(bench: NegativesBenchConfig) -> Iterator[dict[str, Any]]:
    """Yield, per lookup, a row without negatives and a row per number and variant; or the byte counts of ranks."""
    if bench.ranks:
        tokens = bench.batch * bench.length
        yield from measure_bytes(bench.ranks, tokens, bench.dim, bench.num_items, bench.negatives)
        return
    check_device(bench.device)
    lengths = np.full(bench.batch, bench.length)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        write_step_data(data, lengths, num_batches=NUM_BATCHES, num_items=bench.num_items, zipf=0.75)
        for lookup in bench.lookups:
            runner = StepRunner(_run_config(bench, data, lookup), bench.batch)
            try:
                yield from _measure_lookup(bench, runner, lookup)
            finally:
                runner.close()


def _measure_lookup(bench: NegativesBenchConfig, runner: StepRunner, lookup: Lookup) -> Iterator[dict[str, Any]]:
    """Measure all numbers of negatives with the same model and table."""
    task = runner.session.task
    base = {"peak_gib": 0.0}
    assert isinstance(task, RetrievalTask)
    for number in (0, *bench.negatives):
        runner.step(is_last=True)
        runner.use_collator(task.make_collator(number))
        variants = bench.variants if number else bench.variants[:1]
        plain = dict[str, Any]()
        for variant, measured in zip(variants, _measure_in_turn(bench, runner, task, variants), strict=True):
            row = {"variant": variant, "negatives": number, "lookup": lookup, "rows": bench.rows, **measured}
            row["loss_ms"] = round(
                loss_milliseconds(variant, _loss_shape(bench, number), runner.session.engine.device), 3
            )
            if not number:
                base = row
                yield {**row, "variant": "none"}
                continue
            plain = row if variant == "plain" else plain
            yield row | _savings(row, base, plain) | _reference_fields(bench, row)


def _measure_in_turn(
    bench: NegativesBenchConfig, runner: StepRunner, task: RetrievalTask, variants: tuple[Variant, ...]
) -> list[dict[str, Any]]:
    """Return, per variant, the median time of its turns, the largest peak, and the other values of its last turn."""
    turns: list[list[dict[str, Any]]] = [[] for _ in variants]
    for _ in range(bench.rounds):
        for variant, measured in zip(variants, turns, strict=True):
            task.variant = variant
            measured.append(_measure_turn(bench, runner))
    return [_merge_turns(measured) for measured in turns]


def _merge_turns(measured: list[dict[str, Any]]) -> dict[str, Any]:
    times = [turn["step_ms"] for turn in measured]
    return {
        **measured[-1], "peak_gib": max(turn["peak_gib"] for turn in measured),
        "step_ms": round(statistics.median(times), 2), "step_ms_spread": [min(times), max(times)],
    }  # fmt: skip


def _measure_turn(bench: NegativesBenchConfig, runner: StepRunner) -> dict[str, Any]:
    counters = runner.session.engine.statistics
    if bench.device == "cuda":
        torch.cuda.empty_cache()  # because the previous variant may have fragmented the memory
    for _ in range(bench.warm_up):
        runner.step()
    runner.wait()
    if bench.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = counters.vector_bytes
    seconds = runner.seconds(bench.steps)
    peak = torch.cuda.max_memory_allocated() if bench.device == "cuda" else 0
    return {
        "peak_gib": round(peak / 2**30, 3), "step_ms": round(1e3 * seconds, 2),
        "looked_up_bytes": (counters.vector_bytes - before) // bench.steps, "loss": round(float(runner.step()), 4),
        "sharing": bench.sharing, "precision": bench.precision, "items": bench.num_items,
    }  # fmt: skip


def _loss_shape(bench: NegativesBenchConfig, number: int) -> LossShape:
    """Return the shape of the loss of a step, which is also timed alone."""
    return LossShape(
        tokens=bench.batch * bench.length, negatives=number, sharing=bench.sharing, rows=bench.num_items, dim=bench.dim,
        segment_tokens=bench.segment_tokens, kind="sampled_softmax", dtype="float32",
    )  # fmt: skip


def _run_config(bench: NegativesBenchConfig, data: Path, lookup: Lookup) -> RunConfig:
    encoder = HSTUConfig(
        dim=bench.dim, num_layers=bench.num_layers, num_heads=bench.num_heads, head_dim=bench.dim // bench.num_heads,
        max_length=bench.length, position_bias=False,
    )  # fmt: skip
    negatives = NegativesConfig(
        num_negatives=max(bench.negatives),
        logit_sharing=bench.sharing,
        segment_tokens=bench.segment_tokens,
        lookup_dtype=lookup,
    )
    return RunConfig(
        name="negatives",
        task=RetrievalTaskConfig(
            encoder=encoder, history=HistoryConfig(max_events=bench.length), negatives=negatives,
            # Without normalization, vectors of negatives stay float32 for every precision of dense products.
            similarity=SimilarityConfig(normalize=False, temperature=1.0),
            table_optimizer=RowOptimizerConfig(kind="rowwise_adagrad"),
        ),
        tables={"items": TableOverrides(dtype=bench.rows)},
        data=DataConfig(folder=str(data)),
        pipeline=PipelineConfig(schedule=bench.schedule),
        training=TrainingConfig(precision=bench.precision, device=bench.device),
    )  # fmt: skip


def _savings(row: dict[str, Any], base: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """Compare memory of negatives, peak and time with the plain variant of the same number."""
    if not plain or plain["peak_gib"] <= base["peak_gib"]:
        return {}
    cost = row["peak_gib"] - base["peak_gib"]
    plain_cost = plain["peak_gib"] - base["peak_gib"]
    return {
        "negatives_gib": round(cost, 2),
        "saved_of_negatives": round(1 - cost / plain_cost, 4),
        "saved_of_peak": round(1 - row["peak_gib"] / plain["peak_gib"], 4),
        "time_of_plain": round(row["step_ms"] / plain["step_ms"], 4),
    }


def _reference_fields(bench: NegativesBenchConfig, row: dict[str, Any]) -> dict[str, Any]:
    """Return the published memory, and the minimum transfer time of the offloaded bytes."""
    found: dict[str, Any] = {}
    published = PUBLISHED_GB.get(row["negatives"])
    if published is not None and row["variant"] in ("plain", "offload"):
        found["turbogr_gb"] = published[row["variant"] == "offload"]
    if row["variant"] == "offload":
        number_bytes = 4 if bench.rows == "float32" else 2
        num_bytes = 2 * bench.batch * bench.length * (1 + row["negatives"] * bench.sharing) * bench.dim * number_bytes
        found["bus_floor_ms"] = round(1e3 * num_bytes / BUS_BYTES_PER_S, 2)
    return found


def _progress_line(row: dict[str, Any]) -> str:
    figures = [f"{name} {row[name]}" for name in ("peak_gib", "step_ms", "looked_up_bytes") if name in row]
    return f"{row['variant']} {row['negatives']}: {', '.join(figures)}"


BENCH = Bench(config=NegativesBenchConfig, measure=measure_negatives, progress_line=_progress_line)
