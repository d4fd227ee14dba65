"""What ranks run in the tests of balanced training: the real training loop on a tiny dataset."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from nestrec.balance import CostModel
from nestrec.distributed import Topology
from nestrec.trace import Span
from nestrec.training.callbacks import TrainingCallback
from nestrec.training.trainer import Trainer
from support.tiny_runs import config_of

TRUTH = CostModel(token=3e-3, token_squared=2e-5, step=0.01)
"""coarse, so that whole nanoseconds do not show"""
ALWAYS = {"training.dtype": "float64", "training.evaluate_every_epochs": 0, "training.epochs": 1000}


class Kept(TrainingCallback):
    """Keeps the reports."""

    def __init__(self) -> None:
        self.reports: list[dict[str, Any]] = []
        self.warnings: list[str] = []

    def warned(self, text) -> None:
        self.warnings.append(text)

    def stepped(self, step, epoch, values) -> None:
        self.reports.append({"step": step, **values})


def train(topology: Topology, data: str, run: str, num_steps: int, more: dict[str, Any]) -> dict[str, Any]:
    """Weights, losses and what was recorded, after so many steps of a run with these dotted overrides."""
    trainer, kept = open_run(topology, data, run, num_steps, more)
    return finish(trainer, kept, topology)


def train_with_times(  # noqa: PLR0917
    topology: Topology, data: str, run: str, num_steps: int, more: dict[str, Any], slowness: tuple[float, ...] = ()
) -> dict[str, Any]:
    """The same where a step's computing takes what TRUTH says; on a rank that is slow, so many times as long."""
    factor = slowness[topology.rank] if slowness else 1.0
    trainer, kept = open_run(topology, data, run, num_steps, more)
    watch = trainer.balancing.watch
    report = trainer.balancing.report
    spans: list[Span] = []
    times: list[float] = []

    def watched(batch):
        duration_ns = round((TRUTH.step + TRUTH.of(batch.tokens).sum()) * factor * 1e9)
        times.append(duration_ns * 1e-9)
        spans.append(
            Span(
                id=0,
                name="train.compute",
                kind="compute",
                lane="compute",
                start_ns=0,
                end_ns=duration_ns,
                step=trainer.state.step,
            )
        )
        watch(batch)

    trainer.balancing.watch = watched
    trainer.balancing.report = lambda real, step: report(spans + [s for s in real if s.kind == "step"], step)
    return {**finish(trainer, kept, topology), "times": times, "warnings": kept.warnings}


def open_run(topology, data, run, num_steps, more) -> tuple[Trainer, Kept]:
    kept = Kept()
    overrides = {**ALWAYS, "training.max_steps": num_steps, **more}
    return Trainer(config_of("hstu", Path(data), overrides), Path(run), topology, kept), kept


def finish(trainer: Trainer, kept: Kept, topology: Topology) -> dict[str, Any]:
    samples: list[list[int]] = []
    watch = trainer.balancing.watch

    def watched(batch):
        samples.append([int(i) for part in batch.micro_batches for i in part.sample_ids])
        watch(batch)

    trainer.balancing.watch = watched
    state = trainer.train()
    engine = trainer.session.engine
    rows = engine.lookup_readonly({"history": np.arange(61), "positive": np.empty(0, np.int64)})["history"]
    return {
        "loss": [report["loss"] for report in kept.reports],
        "reports": kept.reports,
        "samples": samples,
        "consumed": state.consumed,
        "changes": state.to_plain()["cost_changes"],
        "position": state.position,
        "traded": topology.samples.log.entries(),
        "weights": {
            "items": rows,
            **{name: tensor for name, tensor in trainer.session.dense.tensors().items() if name.startswith("model/")},
        },
    }


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / max(float(b.double().norm()), 1e-300))
