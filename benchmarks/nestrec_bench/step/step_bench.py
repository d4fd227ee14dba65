"""Measure complete training steps of `nestrec train`: MFU, tokens/s, memory, and a breakdown of the time.

A step consists of the engine with its tables on the device, the schedule, the model in bf16, the sampled loss, dense
AdamW and the row optimizer. Batches are collated in advance by the task's collator, as the background threads of a run
do; all other parts of a step are timed.

    nestrec bench step --cases hstu-4x256-u4096,hstu-8x64-lognormal:mean=900,max=8192,count=200 --biases tables
"""

import itertools
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from nestrec.base.config import config
from nestrec.base.config_values import OneOf
from nestrec.base.errors import require
from nestrec.base.files import replaced_folder
from nestrec.data import dataset_schema
from nestrec.data.batch_loader import Batch, Collator
from nestrec.data.batch_order import BatchPosition
from nestrec.data.dataset_card import CARD_FILE, Counts, DatasetCard
from nestrec.data.prepare.dataset_writer import UserBlock, UsersWriter, finish_sequences, write_items
from nestrec.data.samples.retrieval_collator import HistoryConfig
from nestrec.distributed import Topology
from nestrec.embedding.row_optimizer import ROW_OPTIMIZERS, RowOptimizerConfig
from nestrec.models import HSTUConfig
from nestrec.models.backbone_registry import BACKBONES
from nestrec.models.backbone_spec import BackboneConfig
from nestrec.models.heads import NegativesConfig
from nestrec.pipeline import LearningRates, LookaheadIterator, PipelineConfig, PipelineCore, TrainingStep
from nestrec.pipeline.schedule_spec import ScheduleName
from nestrec.tasks.retrieval_task import RetrievalTaskConfig
from nestrec.tasks.task import make_loss_compute
from nestrec.trace import Tracer
from nestrec.training.run_config import DataConfig, RunConfig, TrainingConfig
from nestrec.training.training_session import Session
from nestrec_bench.bench import Bench, OutputPart
from nestrec_bench.harness.gpu_clocks import ClockLog
from nestrec_bench.harness.length_shapes import join_shapes, lengths_of
from nestrec_bench.harness.step_flops import FORMULA, loss_flops, step_flops
from nestrec_bench.kernels.attention_bench import heads_and_dim
from nestrec_bench.kernels.layer_bench import Biases, bias_fields
from nestrec_bench.pages.step_profile import parts_of
from nestrec_bench.step.memory_bench import measure_memory

START_MS = 1_640_995_200_000
MEAN_GAP_MS = 60_000
HELD_OUT = 3
"""Number of events of a user in addition to training tokens: the last target, and those of validation and test."""
ACTION_BITS = {name: dataset_schema.KUAIRAND_BITS[name] for name in ("click", "like", "long_view")}


def write_step_data(folder: Path, lengths: NDArray[np.int64], *, num_batches: int, num_items: int, zipf: float) -> None:
    """Write a dataset with `num_batches` users per training sequence length, and items drawn by a power law."""
    draw = np.random.default_rng(0)
    events = np.tile(lengths + HELD_OUT, num_batches)
    total = int(events.sum())
    # The power law is sampled by inversion; a stride spreads popular items over the catalog.
    rank = np.minimum(num_items * draw.random(total) ** (1.0 / (1.0 - zipf)), num_items - 1).astype(np.int64)
    items = 1 + (rank * 2_654_435_761) % num_items
    times = START_MS + np.cumsum(draw.exponential(MEAN_GAP_MS, total)).astype(np.int64)
    ids = np.arange(len(events))
    counts = np.bincount(items, minlength=num_items + 1)
    scalars = {
        dataset_schema.USER_ID: pa.array(ids),
        dataset_schema.USER_KEY: pa.array(ids).cast(pa.string()),
        dataset_schema.LENGTH: pa.array(events.astype(np.int32)),
    }
    lists = {
        dataset_schema.ITEM_IDS: items,
        dataset_schema.TIMESTAMPS_MS: times,
        dataset_schema.ACTIONS: draw.integers(0, 8, total, np.int32),
    }
    fields = dataset_schema.sequence_fields(has_timestamps=True, has_actions=True, features={})
    with replaced_folder(folder, marker=CARD_FILE, force=False) as output:
        writer = UsersWriter(output, fields)
        writer.append(UserBlock(events.astype(np.int32), scalars, lists))
        numbers = np.arange(1, num_items + 1)
        table = pa.table(
            {
                "item_id": pa.array(numbers),
                "item_key": pa.array(numbers).cast(pa.string()),
                "count": pa.array(counts[1:]),
            }
        )
        files = [*writer.close(), write_items(output, iter([table]))]
        card = DatasetCard(
            kind="sequences",
            name="step",
            source_format="synthetic",
            has_timestamps=True,
            action_bits=ACTION_BITS,
            counts=Counts(users=len(events), items=num_items, events=total, rows_read=total),
        )
        finish_sequences(output, card, events.astype(np.int32), counts[1:], files)


def fixed_batch(collator: Collator, number: int, batch_samples: int) -> Batch:
    """Return the batch of the `batch_samples` samples from `number * batch_samples` on, as one micro-batch."""
    samples = np.arange(number * batch_samples, (number + 1) * batch_samples)
    part = collator.collate(samples, collator.read(samples), number)
    return Batch(
        position=BatchPosition(number, 0),
        weight=collator.weight(samples, number),
        global_samples=samples,
        micro_batches=(part,),
        tokens=collator.tokens_in(samples, number),
    )


NUM_BATCHES = 3
"""Number of different batches, which alternate, so that consecutive steps have different rows and keys."""


@config
class StepBenchConfig:
    """Options of the step benchmark."""

    cases: tuple[str, ...] = (
        "hstu-4x256-u4096", "hstu-8x128-u4096", "hstu-4x256-logn", "hstu-4x256-kuai1k", "hstu-8x128-logn",
        "hstu-8x128-kuai1k", "fuxi-8x128-u4096",
    )  # fmt: skip
    """Cases to measure, each as MODEL-HEADSxDIM-LENGTHS. MODEL is a backbone: hstu has num_layers layers, fuxi twice as
    many (0.2B weights by default), other backbones use those of dim, num_layers, num_heads, head_dim, max_length,
    dropout and activation_checkpointing that they have. LENGTHS is written as in `nestrec bench attention`."""
    tokens: int = 131_072
    """Number of valid tokens per step, for lengths with a name or from a dataset."""
    dim: int = 1024
    """Width of the model and of the item vectors."""
    num_layers: int = 8
    """Number of layers of hstu."""
    biases: tuple[Biases, ...] = ("none", "tables")
    """Relative biases of position and time of hstu, as tables or with a function of time; fuxi always has its
    channels."""
    dropout: float = 0.2
    """Dropout rate inside the layers."""
    recompute: bool = False
    """Whether to use activation checkpointing."""
    num_items: int = 200_000
    """Number of rows of the item table."""
    zipf: float = 0.75
    """Exponent of the item popularity."""
    num_negatives: int = 127
    """Number of negatives per token."""
    sampler: Literal["uniform", "in_batch", "groups"] = "groups"
    """Sampler of negatives."""
    variant: Literal["plain", "segments", "fused"] = "fused"
    """Variant of the loss computation; the sampler groups does not use it."""
    row_optimizer: Annotated[str, OneOf(ROW_OPTIMIZERS)] = "rowwise_adagrad"
    """Name of the row optimizer of the item table."""
    schedule: ScheduleName = "dual_buffer"
    """Pipeline schedule."""
    precision: Literal["bf16", "tf32", "fp32", "fp8"] = "bf16"
    """Precision of dense matrix products on a GPU; the MFU of fp8 is relative to the peak of bf16."""
    device: Literal["cuda", "cpu"] = "cuda"
    """Device. The speed of a CPU is not meaningful; it is for tests."""
    warm_up: int = 6
    """Number of steps before the timed ones: two per batch, because kernels are compiled for each new shape."""
    steps: int = 8
    """Number of timed steps."""
    profiled: int = 2
    """Number of additional steps under the profiler."""
    memory_length: int = 8192
    """Longest sequence of the comparison of memory, jagged against padded; 0 disables it."""


def encoder_of(bench: StepBenchConfig, case: str, biases: Biases = "none") -> tuple[BackboneConfig, NDArray[np.int64]]:
    """Return the encoder and the lengths of a case."""
    model, _, rest = case.partition("-")
    heads, _, shape = rest.partition("-")
    problem = "expected a case of the form MODEL-HEADSxDIM-LENGTHS"
    require(shape, problem, option="cases", value=case, remedy="write it like hstu-4x256-u4096")
    lengths = lengths_of(shape, bench.tokens)
    (num_heads, head_dim) = heads_and_dim(heads)
    sizes: dict[str, Any] = {
        "dim": bench.dim, "num_layers": bench.num_layers, "num_heads": num_heads, "head_dim": head_dim,
        "max_length": int(lengths.max()), "dropout": bench.dropout, "activation_checkpointing": bench.recompute,
        **bias_fields(biases),
    }  # fmt: skip
    if model == "fuxi":
        sizes |= {"num_layers": 2 * bench.num_layers, "ffn_dim": bench.dim}
    cls = BACKBONES.find(model, field="cases").config
    known = {field.name for field in fields(cls)}
    return cls(**{name: value for name, value in sizes.items() if name in known}), lengths


def measure_steps(bench: StepBenchConfig) -> Iterator[dict[str, Any]]:
    """Yield one row per case, then those of the comparison of memory."""
    for case in join_shapes(bench.cases):
        encoders = [encoder_of(bench, case, biases) for biases in bench.biases]
        # A model without biases is the same for every choice, and is measured once.
        for encoder, lengths in {encoder: (encoder, lengths) for encoder, lengths in encoders}.values():
            row = {"model": case, "biases": _biases_of(encoder), "precision": bench.precision}
            yield {**row, **_case(bench, encoder, lengths)}
            _release(bench.device)
    if bench.memory_length:
        encoder, _ = encoder_of(bench, "hstu-4x256-u1024")
        yield from measure_memory(replace(cast(HSTUConfig, encoder), max_length=bench.memory_length), bench.device)


def _biases_of(encoder: BackboneConfig) -> Biases:
    """Return the biases that a model has, which may differ from the option."""
    has_time = getattr(encoder, "time_bias", getattr(encoder, "time_channel", False))
    if has_time and getattr(encoder, "time_encoding", "") == "functional":
        return "functional"
    return "tables" if has_time or getattr(encoder, "position_bias", False) else "none"


def _case(bench: StepBenchConfig, encoder: BackboneConfig, lengths: NDArray[np.int64]) -> dict[str, Any]:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        write_step_data(data, lengths, num_batches=NUM_BATCHES, num_items=bench.num_items, zipf=bench.zipf)
        runner = StepRunner(run_config(bench, encoder, data), len(lengths))
        try:
            setup_s = time.perf_counter() - start
            return {**_measure_case(bench, encoder, lengths, runner), "made_s": round(setup_s, 2)}
        finally:
            runner.close()


def run_config(bench: StepBenchConfig, encoder: BackboneConfig, data: Path) -> RunConfig:
    """Return the run config of a case."""
    return RunConfig(
        name="step",
        task=RetrievalTaskConfig(
            encoder=encoder, history=HistoryConfig(max_events=encoder.max_length),
            negatives=NegativesConfig(
                num_negatives=bench.num_negatives, sampler=bench.sampler, loss_variant=bench.variant, log_q=False
            ),
            table_optimizer=RowOptimizerConfig(kind=bench.row_optimizer),
        ),
        data=DataConfig(folder=str(data)),
        pipeline=PipelineConfig(schedule=bench.schedule),
        training=TrainingConfig(precision=bench.precision, device=bench.device),
    )  # fmt: skip


class StepRunner:
    """The components of a training run, advanced step by step."""

    def __init__(self, cfg: RunConfig, batch_samples: int) -> None:
        self.session = Session.open(cfg, Topology.from_environment(cfg.training.device))
        self.session.task.model.train()
        self._device = self.session.topology.device
        self._pipeline = PipelineCore.build(
            make_loss_compute(self.session.task, self._device, cfg.training.precision), self.session.engine,
            self.session.dense, cfg.pipeline, tracer=Tracer(rank=0),
        )  # fmt: skip
        self._batch_samples = batch_samples
        self._number = 0
        self.use_collator(self.session.task.collator)

    def use_collator(self, collator: Collator) -> None:
        """Take batches of a collator from now on; allowed before the first step, or after a last one."""
        batches = [fixed_batch(collator, b, self._batch_samples) for b in range(NUM_BATCHES)]
        self._feed = LookaheadIterator(_endless(batches))

    def step(self, *, is_last: bool = False) -> torch.Tensor:
        """Run one step and return its loss on the device; the last step is a fence, which leaves nothing in flight."""
        self._number += 1
        step = TrainingStep(
            number=self._number, batch=next(self._feed), rates=LearningRates(1e-4, 1e-2), is_fence=is_last
        )
        return self._pipeline.schedule.advance(step, self._feed).loss

    def seconds(self, steps: int) -> float:
        """Return the mean wall time of some steps, which the host starts without waiting for the device."""
        self.wait()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.wait()
        return (time.perf_counter() - start) / max(steps, 1)

    def wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        self.step(is_last=True)
        self._pipeline.close()


def _endless(batches: list[Batch]) -> Iterator[Batch]:
    for number, batch in enumerate(itertools.cycle(batches)):
        yield replace(batch, position=BatchPosition(number, 0))


def _measure_case(
    bench: StepBenchConfig, encoder: BackboneConfig, lengths: NDArray[np.int64], runner: StepRunner
) -> dict[str, Any]:
    with ClockLog() as clocks:
        warm_up_s = runner.seconds(bench.warm_up) * bench.warm_up
        if bench.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        seconds = runner.seconds(bench.steps)
        found = clocks.medians(start, time.perf_counter())
    tokens = int(lengths.sum())
    flops = step_flops(encoder, lengths)
    row = {
        "lengths": f"{len(lengths)} sequences, longest {lengths.max()}",
        "tokens": tokens,
        "tokens_per_s": round(tokens / seconds),
        "step_ms": round(seconds * 1e3, 2),
        "mfu": round(flops.mfu(seconds), 4),
        "tflops": round(flops.tflops(seconds), 1),
        "step_tflop": round(flops.total / 1e12, 2),
        "loss_tflop_not_counted": round(loss_flops(tokens, 1 + bench.num_negatives, bench.dim) / 1e12, 3),
        "peak_gib": _peak_gib(bench.device),
        "warm_up_s": round(warm_up_s, 2),
        "dense_weights": sum(p.numel() for p in runner.session.task.model.parameters()),
        **found,
        "formula": FORMULA,
    }
    if bench.profiled and bench.device == "cuda":
        row["parts"] = parts_of(runner, bench.profiled, flops)
    row["loss"] = round(float(runner.step()), 4)
    return row


def _peak_gib(device: str) -> float:
    return round(torch.cuda.max_memory_allocated() / 2**30, 2) if device == "cuda" else 0.0


def _release(device: str) -> None:
    if device == "cuda":
        torch.cuda.empty_cache()


def short_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of steps without their long fields."""
    hidden = ("parts", "formula", "lengths", "made_s", "warm_up_s", "power_limit_w")
    return [{k: v for k, v in row.items() if k not in hidden} for row in rows if "step_ms" in row]


def memory_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if "impl" in row]


def _progress_line(row: dict[str, Any]) -> str:
    if "step_ms" not in row:
        return f"{row['model']}: memory"
    return f"{row['model']} ({row['biases']}): {row['step_ms']} ms, MFU {row['mfu']:.1%}. {row.get('parts', '')}"


def _show(rows: Sequence[dict[str, Any]], more: Mapping[str, Any]) -> Iterator[OutputPart]:
    yield FORMULA
    yield "training step", short_rows(list(rows))
    yield "memory of forward and backward", memory_rows(list(rows))


BENCH = Bench(config=StepBenchConfig, measure=measure_steps, show=_show, progress_line=_progress_line)
