"""Jobs that ranks run in the tests of balanced training: the real training loop on a tiny dataset."""

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
"""True cost of a sample; large enough that rounding to nanoseconds does not matter."""
ALWAYS = {"training.weight_dtype": "float64", "training.eval_every_epochs": 0, "training.epochs": 1000}


class ReportRecorder(TrainingCallback):
    """A callback that stores reports and warnings."""

    def __init__(self) -> None:
        self.reports: list[dict[str, Any]] = []
        self.warnings: list[str] = []

    def on_warning(self, text) -> None:
        self.warnings.append(text)

    def on_step_report(self, step, epoch, values) -> None:
        self.reports.append({"step": step, **values})


def train(topology: Topology, data: str, run: str, num_steps: int, more: dict[str, Any]) -> dict[str, Any]:
    """Train a run with these dotted overrides to `num_steps` and return its weights, losses and records."""
    trainer, recorder = open_run(topology, data, run, num_steps, more)
    return finish(trainer, recorder, topology)


def train_with_times(  # noqa: PLR0917
    topology: Topology, data: str, run: str, num_steps: int, more: dict[str, Any], slowness: tuple[float, ...] = ()
) -> dict[str, Any]:
    """Train like `train`, with simulated compute times: the cost of TRUTH times the `slowness` of the rank."""
    factor = slowness[topology.rank] if slowness else 1.0
    trainer, recorder = open_run(topology, data, run, num_steps, more)
    record_step = trainer.balance_controller.record_step
    report = trainer.balance_controller.report
    spans: list[Span] = []
    times: list[float] = []

    def record_simulated_time(batch):
        duration_ns = round((TRUTH.step + TRUTH.sample_costs(batch.tokens).sum()) * factor * 1e9)
        times.append(duration_ns * 1e-9)
        spans.append(
            Span(
                id=0,
                name="train.forward_backward",
                kind="compute",
                lane="compute",
                start_ns=0,
                end_ns=duration_ns,
                step=trainer.state.step,
            )
        )
        record_step(batch)

    trainer.balance_controller.record_step = record_simulated_time
    trainer.balance_controller.report = lambda real, step: report(spans + [s for s in real if s.kind == "step"], step)
    return {**finish(trainer, recorder, topology), "times": times, "warnings": recorder.warnings}


def open_run(topology, data, run, num_steps, more) -> tuple[Trainer, ReportRecorder]:
    recorder = ReportRecorder()
    overrides = {**ALWAYS, "training.max_steps": num_steps, **more}
    return Trainer(config_of("hstu", Path(data), overrides), Path(run), topology, recorder), recorder


def finish(trainer: Trainer, recorder: ReportRecorder, topology: Topology) -> dict[str, Any]:
    """Train to the end and return the results of this rank."""
    samples: list[list[int]] = []
    record_step = trainer.balance_controller.record_step

    def record_samples(batch):
        samples.append([int(i) for part in batch.micro_batches for i in part.sample_ids])
        record_step(batch)

    trainer.balance_controller.record_step = record_samples
    state = trainer.train()
    engine = trainer.session.engine
    rows = engine.lookup_readonly({"history": np.arange(61), "positive": np.empty(0, np.int64)})["history"]
    return {
        "loss": [report["loss"] for report in recorder.reports],
        "reports": recorder.reports,
        "samples": samples,
        "consumed": state.consumed,
        "changes": state.to_plain()["cost_changes"],
        "position": state.position,
        "exchanges": topology.samples.log.entries(),
        "weights": {
            "items": rows,
            **{name: tensor for name, tensor in trainer.session.dense.tensors().items() if name.startswith("model/")},
        },
    }


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / max(float(b.double().norm()), 1e-300))
