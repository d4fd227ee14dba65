"""Runs small enough for tests: each family of recipes on a synthetic dataset, in a fraction of a second per run."""

import dataclasses
import random
import sys
from collections.abc import Mapping
from pathlib import Path

from nestrec.base.config_overrides import apply_overrides
from nestrec.base.config_values import format_iso_time
from nestrec.data.formats.format_registry import prepare
from nestrec.data.synthetic.synthetic_logs import SPAN_MS, START_MS, generate, preset
from nestrec.training.recipes import recipe
from nestrec.training.run_config import RunConfig

FAMILIES = ("hstu", "sasrec", "ranking", "rows")
NUM_USERS, NUM_ITEMS, NUM_ROWS = 40, 60, 150
_VALID_MS = START_MS + SPAN_MS * 6 // 10
_TEST_MS = START_MS + SPAN_MS * 8 // 10

_HISTORY = {"task.history.max_events": "12", "task.encoder.max_length": "12", "task.encoder.dim": "8"}
_RECIPE_OF = {"hstu": "demo", "sasrec": "beauty_sasrec", "ranking": "kuairand_ranking", "rows": "criteo_dlrm"}
_OVERRIDES: dict[str, dict[str, str]] = {
    "hstu": {
        **_HISTORY,
        "task.encoder.head_dim": "4",
        "task.negatives.num_negatives": "4",
        "task.evaluation.ks": "5,10",
    },
    # With eight channels the recipe's dropout would empty whole tokens, and LayerNorms then blow up their gradients.
    "sasrec": {**_HISTORY, "task.encoder.ffn_dim": "8", "task.encoder.dropout": "0.2", "task.evaluation.ks": "5,10"},
    "ranking": {
        "task.encoder.dim": "8",
        "task.encoder.head_dim": "4",
        "task.encoder.max_length": "16",
        "task.history.max_events": "8",
        "task.inputs.event_features": "[]",
        "task.inputs.user_features": "[]",
        "task.inputs.item_features": "topic",
        "task.evaluation.baselines": "logistic",
        "task.evaluation.baseline_category": "",
        "task.split.valid_from": format_iso_time(_VALID_MS),
        "task.split.test_from": format_iso_time(_TEST_MS),
    },
    "rows": {
        "task.encoder.dim": "4",
        "task.encoder.bottom_mlp": "8",
        "task.encoder.top_mlp": "8",
        "task.table_store.admission_threshold": "2",
        "task.table_store.eviction_policy": "lru",
        "task.table_store.max_rows": "120",
        "optimizer.table_learning_rate": "0.1",
    },
}
_COMMON = {
    "training.device": "cpu",
    "training.early_stopping_patience": "none",
    "batch.batch_size": "16",
    "batch.num_micro_batches": "2",
}


def make_datasets(folder: Path, *, num_topics: int = 1) -> None:
    """Write sequences to `folder`/sequences and labeled rows to `folder`/rows.

    The topic table has two rows if there is one topic.
    """
    shape = dataclasses.replace(preset("tiny", num_users=NUM_USERS, num_items=NUM_ITEMS), num_topics=num_topics)
    generate(dataclasses.replace(shape, max_length=24), folder / "sequences")
    source = folder / "rows.txt"
    source.write_text(criteo_text(NUM_ROWS, seed=0))
    prepare("criteo", str(source), folder / "rows")


def criteo_text(num_rows: int, seed: int) -> str:
    """Return text in the format of Criteo: a label, 13 integers and 26 categories per line, some of them blank."""
    draw = random.Random(seed)
    lines = []
    for _ in range(num_rows):
        numbers = [draw.choice(["", str(draw.randrange(100))]) for _ in range(13)]
        categories = [draw.choice(["", f"{draw.randrange(12):08x}"]) for _ in range(26)]
        lines.append("\t".join([str(draw.randrange(2)), *numbers, *categories]))
    return "\n".join(lines) + "\n"


def overrides_of(family: str, data: Path, more: Mapping[str, object] | None = None) -> dict[str, str]:
    """Return dotted overrides that make the family's recipe small; `data` is a folder written by `make_datasets`."""
    source = data / ("rows" if family == "rows" else "sequences")
    extra = {name: str(value) for name, value in (more or {}).items()}
    return {**_COMMON, **_OVERRIDES[family], "data.folder": str(source), **extra}


def config_of(family: str, data: Path, more: Mapping[str, object] | None = None) -> RunConfig:
    return apply_overrides(recipe(_RECIPE_OF[family]), overrides_of(family, data, more))


def command_of(family: str, data: Path, run: Path, more: Mapping[str, object] | None = None) -> list[str]:
    """Return the arguments of a `nestrec train` command with the same configuration."""
    options = [f"--{name}={value}" for name, value in overrides_of(family, data, more).items()]
    return [sys.executable, "-m", "nestrec", "train", _RECIPE_OF[family], "--output", str(run), *options]
