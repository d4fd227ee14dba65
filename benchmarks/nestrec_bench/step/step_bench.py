"""Whole training steps, as `nestrec train` takes them: MFU, tokens a second, memory, and where their time goes.

Samples of the named lengths go through the task's own assembler, the engine with its tables on the device, the
schedule, the model in bf16, the sampled loss, the dense AdamW and the row optimiser. Batches are assembled beforehand,
as the background threads of a run would; everything else of a step is timed.

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
from nestrec.tasks.task import compute_of
from nestrec.trace import Tracer
from nestrec.training.run_config import DataConfig, RunConfig, TrainingConfig
from nestrec.training.training_session import Session
from nestrec_bench.bench import Bench, Shown
from nestrec_bench.harness.gpu_clocks import ClockLog
from nestrec_bench.harness.length_shapes import lengths_of, whole_shapes
from nestrec_bench.harness.step_flops import FORMULA, loss_flops, step_flops
from nestrec_bench.kernels.attention_bench import heads_and_dim
from nestrec_bench.kernels.layer_bench import Biases, bias_fields
from nestrec_bench.pages.step_profile import parts_of
from nestrec_bench.step.memory_bench import measure_memory

START_MS = 1_640_995_200_000
MEAN_GAP_MS = 60_000
HELD_OUT = 3
"""events of a user beyond its training tokens: the last target, and those of validation and test"""
ACTION_BITS = {name: dataset_schema.KUAIRAND_BITS[name] for name in ("click", "like", "long_view")}


def write_step_data(folder: Path, lengths: NDArray[np.int64], *, num_batches: int, num_items: int, zipf: float) -> None:
    """Users whose training sequences have `lengths`, as often as there are batches; items by a power law."""
    draw = np.random.default_rng(0)
    events = np.tile(lengths + HELD_OUT, num_batches)
    total = int(events.sum())
    # A power law by inversion; popular items are spread over the catalogue by a stride.
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
    with replaced_folder(folder, marker=CARD_FILE, force=False) as made:
        writer = UsersWriter(made, fields)
        writer.append(UserBlock(events.astype(np.int32), scalars, lists))
        numbers = np.arange(1, num_items + 1)
        table = pa.table(
            {
                "item_id": pa.array(numbers),
                "item_key": pa.array(numbers).cast(pa.string()),
                "count": pa.array(counts[1:]),
            }
        )
        files = [*writer.close(), write_items(made, iter([table]))]
        card = DatasetCard(
            kind="sequences",
            name="step",
            source_format="synthetic",
            has_timestamps=True,
            action_bits=ACTION_BITS,
            counts=Counts(users=len(events), items=num_items, events=total, rows_read=total),
        )
        finish_sequences(made, card, events.astype(np.int32), counts[1:], files)


def fixed_batch(assembler: Collator, number: int, batch_samples: int) -> Batch:
    """The samples `number * batch_samples` and on, as one micro-batch."""
    samples = np.arange(number * batch_samples, (number + 1) * batch_samples)
    part = assembler.assemble(samples, assembler.read(samples), number)
    return Batch(
        position=BatchPosition(number, 0),
        weight=assembler.weight(samples, number),
        global_samples=samples,
        micro_batches=(part,),
        tokens=assembler.tokens_in(samples, number),
    )


NUM_BATCHES = 3
"""Different batches, taken by turns, so that rows and keys are not those of the step before."""


@config
class StepBench:
    """What is measured."""

    cases: tuple[str, ...] = (
        "hstu-4x256-u4096", "hstu-8x128-u4096", "hstu-4x256-logn", "hstu-4x256-kuai1k", "hstu-8x128-logn",
        "hstu-8x128-kuai1k", "fuxi-8x128-u4096",
    )  # fmt: skip
    """MODEL-HEADSxDIM-LENGTHS each, MODEL a backbone; hstu takes num_layers, fuxi twice as many (0.2B weights at the
    default), others what of dim, num_layers, num_heads, head_dim, max_length, dropout and recompute they have. LENGTHS:
    as those of `bench attention`"""
    tokens: int = 131_072
    """valid tokens of a step, of lengths with a name or from a dataset"""
    dim: int = 1024
    """width of the model and of the item vectors"""
    num_layers: int = 8
    """layers of hstu"""
    biases: tuple[Biases, ...] = ("none", "tables")
    """hstu: relative biases of position and time, as tables or with a function of time; fuxi always has its channels"""
    dropout: float = 0.2
    """inside the layers"""
    recompute: bool = False
    """keep less for the backward pass"""
    num_items: int = 200_000
    """rows of the item table"""
    zipf: float = 0.75
    """exponent of the items' popularity"""
    num_negatives: int = 127
    """negatives of a token"""
    sampler: Literal["uniform", "in_batch", "groups"] = "groups"
    """where negatives come from"""
    variant: Literal["plain", "segments", "fused"] = "fused"
    """how the loss is computed, of all samplers but groups"""
    row_optimizer: Annotated[str, OneOf(ROW_OPTIMIZERS)] = "rowwise_adagrad"
    """row optimiser of the item table, by name"""
    schedule: ScheduleName = "dual_buffer"
    """how lookup and compute share the time"""
    precision: Literal["bf16", "tf32", "fp32", "fp8"] = "bf16"
    """of dense products on a GPU; MFU of fp8 is still a share of the peak of bf16"""
    device: Literal["cuda", "cpu"] = "cuda"
    """a CPU measures no speed that matters; it is for tests"""
    warm_up: int = 6
    """steps that are not timed: every batch twice, for kernels are compiled when a shape of theirs first comes"""
    steps: int = 8
    """timed steps"""
    profiled: int = 2
    """further steps, under the profiler"""
    memory_length: int = 8192
    """longest sequence of the comparison of memory, jagged against padded; 0 leaves it out"""


def encoder_of(bench: StepBench, case: str, biases: Biases = "none") -> tuple[BackboneConfig, NDArray[np.int64]]:
    """The model and the lengths that a case names."""
    model, _, rest = case.partition("-")
    heads, _, shape = rest.partition("-")
    require(shape, "is no case", option="cases", value=case, remedy="write it like hstu-4x256-u4096")
    lengths = lengths_of(shape, bench.tokens)
    (num_heads, head_dim) = heads_and_dim(heads)
    sizes: dict[str, Any] = {
        "dim": bench.dim, "num_layers": bench.num_layers, "num_heads": num_heads, "head_dim": head_dim,
        "max_length": int(lengths.max()), "dropout": bench.dropout, "recompute": bench.recompute, **bias_fields(biases),
    }  # fmt: skip
    if model == "fuxi":
        sizes |= {"num_layers": 2 * bench.num_layers, "ffn_dim": bench.dim}
    cls = BACKBONES.find(model, field="cases").config
    known = {field.name for field in fields(cls)}
    return cls(**{name: value for name, value in sizes.items() if name in known}), lengths


def measure_steps(bench: StepBench) -> Iterator[dict[str, Any]]:
    """A row for each case, then those of the memory."""
    for case in whole_shapes(bench.cases):
        made = [encoder_of(bench, case, biases) for biases in bench.biases]
        # A model without such an option is the same with every choice, and measured once.
        for encoder, lengths in {encoder: (encoder, lengths) for encoder, lengths in made}.values():
            row = {"model": case, "biases": _biases_of(encoder), "precision": bench.precision}
            yield {**row, **_case(bench, encoder, lengths)}
            _release(bench.device)
    if bench.memory_length:
        encoder, _ = encoder_of(bench, "hstu-4x256-u1024")
        yield from measure_memory(replace(cast(HSTUConfig, encoder), max_length=bench.memory_length), bench.device)


def _biases_of(encoder: BackboneConfig) -> Biases:
    """What a model has, whatever was asked for."""
    has_time = getattr(encoder, "time_bias", getattr(encoder, "time_channel", False))
    if has_time and getattr(encoder, "time_encoding", "") == "functional":
        return "functional"
    return "tables" if has_time or getattr(encoder, "position_bias", False) else "none"


def _case(bench: StepBench, encoder: BackboneConfig, lengths: NDArray[np.int64]) -> dict[str, Any]:
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        write_step_data(data, lengths, num_batches=NUM_BATCHES, num_items=bench.num_items, zipf=bench.zipf)
        runner = StepRunner(run_config(bench, encoder, data), len(lengths))
        try:
            made_s = time.perf_counter() - begin
            return {**_measured(bench, encoder, lengths, runner), "made_s": round(made_s, 2)}
        finally:
            runner.close()


def run_config(bench: StepBench, encoder: BackboneConfig, data: Path) -> RunConfig:
    """What `nestrec train` would be given."""
    return RunConfig(
        name="step",
        task=RetrievalTaskConfig(
            encoder=encoder, history=HistoryConfig(max_length=encoder.max_length), num_negatives=bench.num_negatives,
            negatives=NegativesConfig(sampler=bench.sampler, variant=bench.variant, log_q=False),
            item_optimizer=RowOptimizerConfig(kind=bench.row_optimizer),
        ),
        data=DataConfig(folder=str(data)),
        pipeline=PipelineConfig(schedule=bench.schedule),
        training=TrainingConfig(precision=bench.precision, device=bench.device),
    )  # fmt: skip


class StepRunner:
    """The parts of a run, advanced by hand."""

    def __init__(self, cfg: RunConfig, batch_samples: int) -> None:
        self.session = Session.open(cfg, Topology.from_environment(cfg.training.device))
        self.session.task.model.train()
        self._device = self.session.topology.device
        self._pipeline = PipelineCore.build(
            compute_of(self.session.task, self._device, cfg.training.precision), self.session.engine,
            self.session.dense, cfg.pipeline, tracer=Tracer(rank=0),
        )  # fmt: skip
        self._batch_samples = batch_samples
        self._number = 0
        self.take_from(self.session.task.assembler)

    def take_from(self, assembler: Collator) -> None:
        """Batches of this assembler from here on; before the first step, or after a last one."""
        made = [fixed_batch(assembler, b, self._batch_samples) for b in range(NUM_BATCHES)]
        self._feed = LookaheadIterator(_endless(made))

    def step(self, *, is_last: bool = False) -> torch.Tensor:
        """One step; its loss, still on the device. The last one is a fence: nothing is in flight after it."""
        self._number += 1
        step = TrainingStep(
            number=self._number, batch=next(self._feed), rates=LearningRates(1e-4, 1e-2), is_fence=is_last
        )
        return self._pipeline.schedule.advance(step, self._feed).loss

    def seconds(self, steps: int) -> float:
        """Mean wall time of so many steps, each begun as soon as the host gets to it."""
        self.wait()
        begin = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.wait()
        return (time.perf_counter() - begin) / max(steps, 1)

    def wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        self.step(is_last=True)
        self._pipeline.close()


def _endless(batches: list[Batch]) -> Iterator[Batch]:
    for number, batch in enumerate(itertools.cycle(batches)):
        yield replace(batch, position=BatchPosition(number, 0))


def _measured(
    bench: StepBench, encoder: BackboneConfig, lengths: NDArray[np.int64], runner: StepRunner
) -> dict[str, Any]:
    with ClockLog() as clocks:
        warm_up_s = runner.seconds(bench.warm_up) * bench.warm_up
        if bench.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        seconds = runner.seconds(bench.steps)
        found = clocks.medians(begin, time.perf_counter())
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
    """Steps without what is long."""
    hidden = ("parts", "formula", "lengths", "made_s", "warm_up_s", "power_limit_w")
    return [{k: v for k, v in row.items() if k not in hidden} for row in rows if "step_ms" in row]


def memory_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if "impl" in row]


def _said(row: dict[str, Any]) -> str:
    if "step_ms" not in row:
        return f"{row['model']}: memory"
    return f"{row['model']} ({row['biases']}): {row['step_ms']} ms, MFU {row['mfu']:.1%}. {row.get('parts', '')}"


def _show(rows: Sequence[dict[str, Any]], more: Mapping[str, Any]) -> Iterator[Shown]:
    yield FORMULA
    yield "training step", short_rows(list(rows))
    yield "memory of forward and backward", memory_rows(list(rows))


BENCH = Bench(config=StepBench, measure=measure_steps, show=_show, said=_said)
