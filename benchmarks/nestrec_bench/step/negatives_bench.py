"""Memory and time of training steps, by the number of negatives and how their vectors are kept.

Steps are those of `nestrec bench step` (tables, schedule, model, loss, both optimisers), on sequences of one length.
Memory of negatives is the peak above that of the same step without negatives; `loss_ms` is forward and backward of the
loss alone, on random float32 rows. Published figures are TurboGR's of
FuXi-large on another kind of device, without and with its offload: only their ratios can be compared.

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
    """Rows for each number of negatives and type; tokens: of a rank."""
    counted = run_on_ranks(ranks, count_all, (tokens, dim, num_items), negatives)
    total = {case: np.sum([rank[case] for rank in counted], axis=0) for case in counted[0]}
    for number in negatives:
        whole = total[number, "full"] - total[0, "full"]
        for lookup in LOOKUPS:
            mine = total[number, lookup] - total[0, lookup]
            yield {
                "variant": "bytes",
                "negatives": number,
                "lookup": lookup,
                "ranks": ranks,
                "items": num_items,
                "dim": dim,
                "tokens": tokens,
                "looked_up_bytes": int(mine[0]),
                "sent_bytes": int(mine[1]),
                "of_full": [round(share, 4) for share in (mine / whole).tolist()],
            }


def count_all(
    topology: Topology, shape: tuple[int, int, int], negatives: tuple[int, ...]
) -> dict[tuple[int, Lookup], tuple[int, int]]:
    """(number of negatives, type) to the bytes of one rank, also without negatives."""
    return {(n, lookup): count_bytes(topology, shape, n, lookup) for n in (0, *negatives) for lookup in LOOKUPS}


def count_bytes(topology: Topology, shape: tuple[int, int, int], negatives: int, lookup: Lookup) -> tuple[int, int]:
    """Bytes of vectors of one step: looked up by this rank's shard, and sent to others."""
    tokens, dim, num_items = shape
    half: dict[str, Any] = {} if lookup == "full" else {"half_features": ("negative",), "half_dtype": lookup}
    features = ("history", "negative")
    table = TableConfig(name="items", dim=dim, num_rows=num_items + 1, features=features, **half)
    engine = EmbeddingEngine([table], topology)
    key_T = fold_array(topology.rank, np.arange(tokens))
    keys = {
        "history": 1 + (fold_array(key_T, key_T) % np.uint64(num_items)).astype(np.int64),
        "negative": uniform_negatives(key_T, negatives, num_items),
    }
    routed = engine.route(keys)
    engine.exchange_vectors(routed, engine.fetch(routed, step=1))
    return engine.statistics.vector_bytes, engine.statistics.vectors.bytes_sent


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
    lookups: tuple[Lookup, ...] = ("full",)
    """types in which rows that are only negatives are looked up"""
    rows: Literal["float32", "bfloat16", "float16"] = "float32"
    """type of the rows of the item table"""
    sharing: int = 1
    """tokens whose negatives one meets"""
    batch: int = 6
    """sequences of a step"""
    length: int = 2048
    """tokens of a sequence"""
    num_layers: int = 16
    """layers of HSTU"""
    dim: int = 1024
    """width of the model and of the rows"""
    num_heads: int = 4
    """attention heads; a head is as wide as leaves the model its width"""
    num_items: int = 131_072
    """rows of the item table, drawn uniformly"""
    segment_tokens: int = 512
    """tokens whose vectors are in memory at a time"""
    schedule: Literal["serial", "dual_buffer"] = "dual_buffer"
    """how lookup and compute share the time"""
    precision: Literal["tf32", "bf16", "fp32"] = "bf16"
    """of dense products on a GPU: fp32, tf32 or bf16"""
    device: Literal["cuda", "cpu"] = "cuda"
    """a CPU measures no memory; it is for tests"""
    warm_up: int = 3
    """steps that are not timed"""
    steps: int = 5
    """timed steps"""
    rounds: int = 3
    """turns that the variants of one number take; the row holds the median of their times, so that what the host did
    meanwhile meets all of them alike"""
    ranks: int = 0
    """so many ranks of this machine's CPU count the bytes they move, and nothing is timed; 0: one device is timed"""


def measure_negatives(bench: NegativesBench) -> Iterator[dict[str, Any]]:
    """For each lookup a row without negatives, then one for each number and variant; or the bytes that ranks move."""
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
                yield from _of_lookup(bench, runner, lookup)
            finally:
                runner.close()


def _of_lookup(bench: NegativesBench, runner: StepRunner, lookup: Lookup) -> Iterator[dict[str, Any]]:
    """All numbers of negatives on the same model and table."""
    task = runner.session.task
    base = {"peak_gib": 0.0}
    assert isinstance(task, RetrievalTask)
    for number in (0, *bench.negatives):
        runner.step(is_last=True)
        runner.take_from(task.assembler_of(number))
        variants = bench.variants if number else bench.variants[:1]
        plain = dict[str, Any]()
        for variant, measured in zip(variants, _by_turns(bench, runner, task, variants), strict=True):
            row = {"variant": variant, "negatives": number, "lookup": lookup, "rows": bench.rows, **measured}
            row["loss_ms"] = round(
                loss_milliseconds(variant, _loss_shape(bench, number), runner.session.engine.device), 3
            )
            if not number:
                base = row
                yield {**row, "variant": "none"}
                continue
            plain = row if variant == "plain" else plain
            yield row | _compared(row, base, plain) | _beside(bench, row)


def _by_turns(
    bench: NegativesBench, runner: StepRunner, task: RetrievalTask, variants: tuple[Variant, ...]
) -> list[dict[str, Any]]:
    """For each variant the median time of its turns, the largest peak, and everything else of its last turn."""
    turns: list[list[dict[str, Any]]] = [[] for _ in variants]
    for _ in range(bench.rounds):
        for variant, measured in zip(variants, turns, strict=True):
            task.variant = variant
            measured.append(_measured(bench, runner))
    return [_of_turns(measured) for measured in turns]


def _of_turns(measured: list[dict[str, Any]]) -> dict[str, Any]:
    times = [turn["step_ms"] for turn in measured]
    return {
        **measured[-1], "peak_gib": max(turn["peak_gib"] for turn in measured),
        "step_ms": round(statistics.median(times), 2), "step_ms_spread": [min(times), max(times)],
    }  # fmt: skip


def _measured(bench: NegativesBench, runner: StepRunner) -> dict[str, Any]:
    counters = runner.session.engine.statistics
    if bench.device == "cuda":
        torch.cuda.empty_cache()  # what the variant before has left in pieces
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


def _loss_shape(bench: NegativesBench, number: int) -> LossShape:
    """The loss of a step alone, on random rows."""
    return LossShape(
        tokens=bench.batch * bench.length, negatives=number, sharing=bench.sharing, rows=bench.num_items, dim=bench.dim,
        segment_tokens=bench.segment_tokens, kind="sampled_softmax", dtype="float32",
    )  # fmt: skip


def _run_config(bench: NegativesBench, data: Path, lookup: Lookup) -> RunConfig:
    encoder = HSTUConfig(
        dim=bench.dim, num_layers=bench.num_layers, num_heads=bench.num_heads, head_dim=bench.dim // bench.num_heads,
        max_length=bench.length, position_bias=False,
    )  # fmt: skip
    negatives = NegativesConfig(sharing=bench.sharing, segment_tokens=bench.segment_tokens, lookup=lookup)
    return RunConfig(
        name="negatives",
        task=RetrievalTaskConfig(
            encoder=encoder, history=HistoryConfig(max_length=bench.length), negatives=negatives,
            # Rows as they are: vectors of negatives stay float32 whatever the precision of dense products.
            similarity=SimilarityConfig(normalise=False, temperature=1.0), num_negatives=max(bench.negatives),
            item_optimizer=RowOptimizerConfig(kind="rowwise_adagrad"),
        ),
        tables={"items": TableOverrides(dtype=bench.rows)},
        data=DataConfig(folder=str(data)),
        pipeline=PipelineConfig(schedule=bench.schedule),
        training=TrainingConfig(precision=bench.precision, device=bench.device),
    )  # fmt: skip


def _compared(row: dict[str, Any], base: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """Beside the plain variant of the same number: memory of negatives saved, peak saved, and time."""
    if not plain or plain["peak_gib"] <= base["peak_gib"]:
        return {}
    cost = row["peak_gib"] - base["peak_gib"]
    whole = plain["peak_gib"] - base["peak_gib"]
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
        number_bytes = 4 if bench.rows == "float32" else 2
        moved = 2 * bench.batch * bench.length * (1 + row["negatives"] * bench.sharing) * bench.dim * number_bytes
        found["bus_floor_ms"] = round(1e3 * moved / BUS_BYTES_PER_S, 2)
    return found


def _said(row: dict[str, Any]) -> str:
    figures = [f"{name} {row[name]}" for name in ("peak_gib", "step_ms", "looked_up_bytes") if name in row]
    return f"{row['variant']} {row['negatives']}: {', '.join(figures)}"


BENCH = Bench(config=NegativesBench, measure=measure_negatives, said=_said)
