"""Writes run folders in the format of the trainer, with synthetic but realistic content."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nestrec.data.dataset_card import Counts, DatasetCard, length_statistics, log_histogram, popularity_statistics
from nestrec.trace import Span, save_spans

STEPS_PER_EPOCH = 40
HEADLINE = "ndcg@10"
USERS = (30, 10, 20, 40)
"""Users of a synthetic test set, not in order."""


def write_run(folder: Path, *, num_epochs: int = 12, with_test: bool = True, with_trace: bool = True) -> Path:
    """Write config, versions, metrics, card and, if `with_trace`, a trace of two ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(make_config(), indent=2))
    (folder / "versions.json").write_text(json.dumps(make_versions(), indent=2))
    parameters = {"dense": 12_345, "tables": {"items": {"rows": 3707, "dim": 50}}}
    (folder / "parameters.json").write_text(json.dumps(parameters))
    make_card().save(folder)
    records = make_records(num_epochs, with_test=with_test)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if with_trace:
        save_spans(folder / "trace.jsonl", make_spans())
    return folder


def write_ranks(
    folder: Path,
    recipe: str,
    seed: int,
    ranks: Sequence[int],
    *,
    users: Sequence[int] = USERS,
    ks: tuple[int, ...] = (10, 50),
) -> Path:
    """Write a tested run whose model ranked the target of `users[i]` at `ranks[i]`.

    The popularity baseline finds the target of the first user only.
    """
    (folder / "eval").mkdir(parents=True)
    config: dict[str, Any] = make_config(recipe, seed)
    config["task"]["evaluation"]["ks"] = list(ks)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "versions.json").write_text(json.dumps(make_versions()))
    (folder / "card.json").write_text('{"name": "four users"}')
    popularity = np.where(np.arange(len(users)) == 0, 1, 0)
    arrays = {"users": np.array(users), "rank/model": np.array(ranks), "rank/popularity": popularity}
    np.savez(folder / "eval" / "test.npz", **arrays)  # type: ignore[arg-type]
    return folder


def make_config(name: str = "ml_1m_hstu", seed: int = 42) -> dict[str, Any]:
    return {
        "name": name,
        "task": {
            "kind": "retrieval",
            "encoder": {"kind": "hstu", "dim": 50, "num_layers": 2},
            "evaluation": {"ks": [10, 50, 200], "main_metric": HEADLINE},
        },
        "data": {"folder": "data/ml-1m", "synthetic": None},
        "optimizer": {"learning_rate": 0.001, "weight_decay": 0.0},
        "training": {"epochs": 12, "seed": seed},
    }


def make_versions() -> dict[str, Any]:
    return {
        "nestrec": "0.1.0",
        "torch": "2.13.0+cpu",
        "python": "3.11.9",
        "platform": "Linux-6.1-x86_64",
        "device": "cpu",
        "cpu_count": 2,
        "started": "2026-05-04T10:20:30+00:00",
        "command": "nestrec train ml_1m_hstu --training.epochs 12",
    }


def make_card() -> DatasetCard:
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(4.6, 1.0, 6040), 5, 2000).astype(np.int64)
    popularity = np.clip(generator.lognormal(4.4, 1.7, 3706), 1, 4000).astype(np.int64)
    return DatasetCard(
        kind="sequences",
        name="ML-1M like",
        source_format="synthetic",
        counts=Counts(
            users=6040,
            items=3706,
            events=int(lengths.sum()),
            rows_read=int(lengths.sum()) + 12,
            quarantined={"missing id": 12},
            filtered={"min_rating": 345},
        ),
        lengths=length_statistics(lengths),
        popularity=popularity_statistics(popularity),
        length_histogram=log_histogram(lengths),
        popularity_histogram=log_histogram(popularity),
        has_timestamps=True,
    )


def make_records(num_epochs: int, *, with_test: bool = True) -> list[dict[str, Any]]:
    """Return records of steps with an evaluation after each epoch, a resume in the middle and the test at the end."""
    generator = np.random.default_rng(1)
    records: list[dict[str, Any]] = []
    for epoch in range(1, num_epochs + 1):
        first = (epoch - 1) * STEPS_PER_EPOCH
        if epoch == 6:
            records.append({"kind": "event", "step": first, "text": f"resumed from step {first}"})
        records += [make_step(step, epoch, generator) for step in range(first + 1, first + STEPS_PER_EPOCH + 1)]
        records.append(make_evaluation(first + STEPS_PER_EPOCH, epoch, "valid"))
    if with_test and num_epochs:
        records.append(make_evaluation(num_epochs * STEPS_PER_EPOCH, num_epochs, "test"))
    return records


def make_step(step: int, epoch: int, generator: np.random.Generator) -> dict[str, Any]:
    compute = 210.0 + 20 * generator.random() + (900 if step == 1 else 0)
    parts = {
        "data": 3.0,
        "route": 6.5,
        "fetch": 12.0,
        "vectors": 8.0,
        "compute": compute,
        "gradients": 21.0,
        "update": 32.0,
    }
    step_ms = sum(parts.values()) + 4.0
    return {
        "kind": "step",
        "step": step,
        "epoch": epoch,
        "loss": 4.2 + 3.2 * math.exp(-step / 150) + 0.15 * generator.normal(),
        "samples_per_s": 128 / step_ms * 1000,
        "tokens_per_s": 128 * 110 / step_ms * 1000,
        "memory_mib": 812 + min(step, 50) * 3.1,
        "step_ms": step_ms,
        "parts": parts,
        "learning_rate": 0.001 * min(1, step / 60),
    }


def make_evaluation(step: int, epoch: int, part: str) -> dict[str, Any]:
    strength = 0.19 * (1 - math.exp(-epoch / 4)) * (0.97 if part == "test" else 1.0)
    systems = {"model": strength, "popularity": 0.0312, "last item": 0.0874}
    metrics = {system: _metrics(value) for system, value in systems.items()}
    return {"kind": "evaluation", "step": step, "epoch": epoch, "part": part, "headline": HEADLINE, "metrics": metrics}


def _metrics(ndcg: float) -> dict[str, list[float]]:
    values = {
        f"{name}@{k}": ndcg * factor * (k / 10) ** 0.3
        for k in (10, 50, 200)
        for name, factor in (("hr", 1.7), ("ndcg", 1.0), ("mrr", 0.8))
    }
    return {name: [value, value * 0.96, value * 1.04] for name, value in values.items()}


def make_spans(num_steps: int = 4) -> list[Span]:
    """Return spans of two ranks: the second enters the exchange late, and the compute lane waits for part of it."""
    spans = []
    for rank in range(2):
        for step in range(num_steps):
            at = step * 10_000_000
            late = rank * 500_000
            id_ = step * 10
            common: dict[str, Any] = {"rank": rank, "step": step}
            spans += [
                Span(
                    id=id_,
                    name="train.step",
                    kind="step",
                    lane="compute",
                    start_ns=at,
                    end_ns=at + 10_000_000,
                    **common,
                ),
                Span(
                    id=id_ + 1,
                    name="train.lookup",
                    kind="lookup",
                    lane="host",
                    start_ns=at,
                    end_ns=at + 2_000_000,
                    **common,
                ),
                Span(
                    id=id_ + 2,
                    name="train.embedding.exchange",
                    kind="communication",
                    lane="exchange",
                    start_ns=at + 2_000_000 + late,
                    end_ns=at + 4_000_000,
                    is_collective=True,
                    **common,
                ),
                Span(
                    id=id_ + 5,
                    name="wait",
                    kind="wait",
                    lane="exchange",
                    start_ns=at,
                    end_ns=at + 2_000_000,
                    awaits=id_ + 1,
                    **common,
                ),
                Span(
                    id=id_ + 3,
                    name="wait",
                    kind="wait",
                    lane="compute",
                    start_ns=at,
                    end_ns=at + 4_000_000,
                    awaits=id_ + 2,
                    **common,
                ),
                Span(
                    id=id_ + 4,
                    name="train.forward",
                    kind="compute",
                    lane="compute",
                    start_ns=at + 4_000_000,
                    end_ns=at + 9_500_000,
                    **common,
                ),
            ]
    return spans
