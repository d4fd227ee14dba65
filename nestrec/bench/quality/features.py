"""What features bring: public datasets with them and by ids alone, over seeds, beside systems without a model.

nestrec bench features --data data --what kuairand,ml_100k --seeds 1,2,3 --json docs/results/features.json

`--data` holds the prepared datasets by the names of their recipes' folders. A run that has ended is not trained again.
A row is the mean over seeds; `low` and `high` are the means of their 95% intervals over users.
"""

import json
import math
import statistics
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nestrec.base.bounds import Count
from nestrec.base.config import config
from nestrec.base.errors import UserError, did_you_mean
from nestrec.bench.bench import Bench, More, Row
from nestrec.bench.quality.quality import trained_on
from nestrec.library.configured import configured
from nestrec.library.runs import train
from nestrec.training.recipes import recipe

KUAIRAND_USERS = (
    "active_degree", "is_video_author", "follow_user_num_range", "fans_user_num_range", "register_days_range",
    *(f"onehot_feat{i}" for i in (1, 2, 3, 4, 5, 7, 8)),
    "earlier_watch_seq", "earlier_like_seq", "earlier_long_watch_seq", "earlier_history_len",
)  # fmt: skip
KUAIRAND_ITEMS = ("author_id", "video_type", "upload_type", "music_type", "music_id", "tag", "video_duration")
_NONE = {f"task.inputs.{owner}_features": () for owner in ("event", "user", "item")}
_BY_TIME = {"task.split.kind": "time", "task.evaluation.filter_seen": "history"}
Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Experiment:
    """One dataset, read in several ways."""

    recipe: str
    metrics: tuple[str, ...]
    inputs: Mapping[str, Options]
    """name of what is read to the options that say so"""
    common: Options
    """of all of them"""


EXPERIMENTS: dict[str, Experiment] = {
    "kuairand": Experiment(
        "kuairand_ranking",
        ("auc/click", "gauc/click", "ne/click", "calibration/click"),
        {
            "ids": _NONE,
            "features": {
                "task.inputs.event_features": ("tab", "duration_ms"),
                "task.inputs.user_features": KUAIRAND_USERS,
                "task.inputs.item_features": KUAIRAND_ITEMS,
            },
        },
        {"task.inputs.labels": ("click",)},
    ),
    "ml_100k": Experiment(
        "ml_100k_hstu",
        ("hr@50", "ndcg@50"),
        {
            "ids": {},
            "features": {
                "task.inputs.item_features": ("class", "release_year"),
                "task.inputs.user_features": ("age", "gender", "occupation"),
            },
        },
        {**_BY_TIME, "task.evaluation.ks": (50,), "task.evaluation.headline": "ndcg@50"},
    ),
    "beauty": Experiment(
        "beauty_hstu",
        ("ndcg@10", "hr@10"),
        {"ids": {}, "attributes": {"task.inputs.item_features": ("attributes",)}},
        {},
    ),
}


@config
class FeaturesBench:
    what: tuple[str, ...] = tuple(EXPERIMENTS)
    """datasets"""
    data: str = "data"
    """folder of the prepared datasets"""
    seeds: tuple[int, ...] = (1, 2, 3)
    """each of them trained with every choice of inputs"""
    epochs: Count | None = None
    """at most so many; none: as the recipe"""
    options: str = ""
    """OPTION=VALUE, joined by +, of all runs"""
    output: str = "runs/features"
    """where the runs lie"""


def _measure(bench: FeaturesBench) -> Generator[Row, None, More]:
    runs: list[Path] = []
    for name in bench.what:
        if name not in EXPERIMENTS:
            raise UserError(
                "is no dataset of this bench", field="what", value=name, remedy=did_you_mean(name, EXPERIMENTS)
            )
        found: dict[str, list[Mapping[str, Any]]] = {}
        for seed in bench.seeds:
            for inputs, options in EXPERIMENTS[name].inputs.items():
                runs.append(Path(bench.output) / f"{name}-{inputs}-{seed}")
                found.setdefault(inputs, []).append(_tested(bench, EXPERIMENTS[name], options, seed, runs[-1]))
        yield from _rows(name, EXPERIMENTS[name], found)
    return {"hardware": trained_on(runs)}


def _tested(bench: FeaturesBench, experiment: Experiment, options: Options, seed: int, run: Path) -> Mapping[str, Any]:
    """The evaluation of a run on its test part."""
    file = run / "eval" / "test.json"
    if not file.exists():
        folder = Path(bench.data) / Path(recipe(experiment.recipe).data.folder).name
        given = dict(pair.split("=", 1) for pair in bench.options.split("+") if pair)
        epochs = {} if bench.epochs is None else {"training.epochs": bench.epochs}
        own = {"data.folder": str(folder), "training.seed": seed, **epochs, **given}
        train(configured(experiment.recipe, {**experiment.common, **options, **own}), output=run)
    found: Mapping[str, Any] = json.loads(file.read_text())
    return found


def _rows(name: str, experiment: Experiment, found: Mapping[str, list[Mapping[str, Any]]]) -> Iterator[Row]:
    task = recipe(experiment.recipe).task.kind
    first = next(iter(found.values()))
    systems = {inputs: ("model", tested) for inputs, tested in found.items()}
    systems |= {system: (system, first) for system in first[0]["metrics"] if not system.startswith("model")}
    for inputs, (system, tested) in systems.items():
        parts = {"all": [t["metrics"] for t in tested]}
        for part in tested[0].get("slices", {}):
            if part in ("new items", "rare items", "new users"):
                parts[part] = [t["slices"][part]["metrics"] for t in tested]
        for part, metrics in parts.items():
            for metric in experiment.metrics:
                values = [m[system][metric] for m in metrics if metric in m.get(system, {})]
                if values:
                    value, low, high = (statistics.fmean(column) for column in zip(*values, strict=True))
                    yield {
                        "dataset": name,
                        "task": task,
                        "inputs": inputs,
                        "part": part,
                        "seeds": len(values),
                        "metric": metric,
                        "value": round(value, 5),
                        "low": _rounded(low),
                        "high": _rounded(high),
                        "of_seeds": [round(v[0], 5) for v in values],
                    }


def _rounded(value: float) -> float | None:
    """None where a metric has no interval."""
    return round(value, 5) if math.isfinite(value) else None


BENCH = Bench(config=FeaturesBench, measure=_measure)
