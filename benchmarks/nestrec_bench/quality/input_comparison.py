"""What is read brings what? Datasets by ids alone and with their features, and recipes by hand and by `train auto`.

Each run lies in a folder of its own, and one that has ended is not trained again: parts of a comparison may be trained
beside each other, by commands of their own, and are put together by one that asks for all of them.
"""

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nestrec.api import configured, train
from nestrec.base.config import config, to_plain
from nestrec.base.config_values import Count, from_plain
from nestrec.base.errors import UserError, did_you_mean
from nestrec.training.recipes import recipe
from nestrec.training.recipes.auto_recipe import NAME as AUTO
from nestrec.training.run_config import RunConfig
from nestrec.training.run_folder import read_evaluation

KUAIRAND_USERS = (
    "active_degree", "is_video_author", "follow_user_num_range", "fans_user_num_range", "register_days_range",
    *(f"onehot_feat{i}" for i in (1, 2, 3, 4, 5, 7, 8)),
    "earlier_watch_seq", "earlier_like_seq", "earlier_long_watch_seq", "earlier_history_len",
)  # fmt: skip
KUAIRAND_ITEMS = ("author_id", "video_type", "upload_type", "music_type", "music_id", "tag", "video_duration")
KUAIRAND_FEATURES = {
    "task.inputs.event_features": ("tab", "duration_ms"),
    "task.inputs.user_features": KUAIRAND_USERS,
    "task.inputs.item_features": KUAIRAND_ITEMS,
}
_NONE = {f"task.inputs.{owner}_features": () for owner in ("event", "user", "item")}
_BY_TIME = {"task.split.kind": "time", "task.evaluation.filter_seen": "history"}
_ATTRIBUTES: "Mapping[str, Options]" = {"ids": {}, "attributes": {"task.inputs.item_features": ("attributes",)}}
BY_HAND = "recipe"
SLICES = ("new items", "rare items", "new users")
Options = Mapping[str, Any]
Tested = Mapping[str, Any]
"""The evaluation of a run on its test part, as its file has it, with the run's `name` and `task`."""
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Experiment:
    """One dataset, read in several ways."""

    recipe: str | None
    """what is trained; none where `auto` has no recipe beside it"""
    inputs: Mapping[str, Options]
    """name of what is read to the options that say so"""
    metrics: tuple[str, ...] = ()
    """none: the one that chooses the best epoch"""
    common: Options = field(default_factory=dict)
    """of all of them"""
    folder: str = ""
    """of the prepared dataset; '': as the recipe has it"""

    @property
    def data(self) -> str:
        return self.folder or Path(recipe(str(self.recipe)).data.folder).name


def _automatic(folder: str, by_hand: str | None = None) -> Experiment:
    return Experiment(by_hand, {AUTO: {}, **({BY_HAND: {}} if by_hand else {})}, folder=folder)


EXPERIMENTS: dict[str, Experiment] = {
    "kuairand": Experiment(
        "kuairand_ranking",
        {
            "ids": _NONE,
            "features": KUAIRAND_FEATURES,
            "interactions": {**KUAIRAND_FEATURES, "task.head.interactions": True},
            "prefix": {**KUAIRAND_FEATURES, "task.inputs.user_tokens": "prefix"},
        },
        ("auc/click", "gauc/click", "ne/click", "calibration/click"),
        {"task.inputs.labels": ("click",)},
    ),
    "ml_100k": Experiment(
        "ml_100k_hstu",
        {
            "ids": {},
            "features": {
                "task.inputs.item_features": ("class", "release_year"),
                "task.inputs.user_features": ("age", "gender", "occupation"),
            },
        },
        ("ndcg@10", "hr@10", "hr@50", "ndcg@50"),
        {**_BY_TIME, "task.evaluation.ks": (10, 50), "task.evaluation.headline": "ndcg@50"},
    ),
    "beauty": Experiment("beauty_hstu", _ATTRIBUTES, ("ndcg@10", "hr@10", "hr@50")),
    "beauty_new": Experiment("beauty_hstu", _ATTRIBUTES, ("ndcg@10", "hr@10", "hr@50"), folder="beauty-new"),
    "auto_ml_100k": _automatic("ml-100k", "ml_100k_hstu"),
    "auto_ml_1m": _automatic("ml-1m-ordered", "ml_1m_ordered_hstu"),
    "auto_beauty": _automatic("beauty", "beauty_hstu"),
    "auto_kuairand": _automatic("kuairand-pure", "kuairand_ranking"),
    "auto_criteo": _automatic("criteo", "criteo_dlrm"),
    "auto_taobao": _automatic("taobao-mini"),
    "auto_interests": _automatic("synthetic-interests"),
    "auto_long": _automatic("synthetic-long"),
}


@config
class InputComparison:
    what: tuple[str, ...] = tuple(name for name in EXPERIMENTS if not name.startswith(AUTO))
    """datasets"""
    inputs: tuple[str, ...] = ()
    """only what is read so; none: all ways"""
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


def experiment_of(name: str) -> Experiment:
    """By its name, or an error that names those that there are."""
    if name not in EXPERIMENTS:
        raise UserError("is no dataset of this bench", option="what", value=name, remedy=did_you_mean(name, EXPERIMENTS))
    return EXPERIMENTS[name]


def runs_of(cfg: InputComparison, name: str) -> dict[str, list[Path]]:
    """Of a dataset: name of what is read to a run folder for each seed, trained and tested."""
    found: dict[str, list[Path]] = {}
    for seed in cfg.seeds:
        for inputs in cfg.inputs or experiment_of(name).inputs:
            run = Path(cfg.output) / f"{name}-{inputs}-{seed}"
            if not (run / "eval" / "test.json").exists():
                train(_config(cfg, experiment_of(name), inputs, seed), output=run)
            found.setdefault(inputs, []).append(run)
    return found


def tested(run: Path) -> Tested:
    """What the test of a run wrote."""
    made = json.loads((run / "config.json").read_text())
    return {**read_evaluation(run / "eval" / "test.json"), "name": made["name"], "task": made["task"]["kind"]}


def rows_of(name: str, experiment: Experiment, found: Mapping[str, Sequence[Tested]]) -> Iterator[Row]:
    """A row is the mean over seeds; `low` and `high` are the means of their 95% intervals over users."""
    first = next(iter(found.values()))
    systems = {(inputs, system): (system, of) for inputs, of in found.items() for system in _of_model(of[0])}
    systems |= {("", system): (system, first) for system in first[0]["metrics"] if system not in _of_model(first[0])}
    for (inputs, shown), (system, of) in systems.items():
        parts = {"all": [t["metrics"] for t in of]}
        parts |= {p: [t["slices"][p]["metrics"] for t in of] for p in SLICES if p in of[0].get("slices", {})}
        for part, metrics in parts.items():
            for metric in experiment.metrics or (first[0]["headline"],):
                values = [m[system][metric] for m in metrics if metric in m.get(system, {})]
                if values:
                    value, low, high = (statistics.fmean(column) for column in zip(*values, strict=True))
                    yield {
                        "dataset": name,
                        "task": of[0]["task"],
                        "inputs": shown.replace("model", inputs),
                        "part": part,
                        "events": of[0]["slices"][part]["count"] if part != "all" else None,
                        "seeds": len(values),
                        "metric": metric,
                        "value": round(value, 5),
                        "low": _rounded(low),
                        "high": _rounded(high),
                        "of_seeds": [round(v[0], 5) for v in values],
                    }


def _of_model(of: Tested) -> list[str]:
    return [system for system in of["metrics"] if system.startswith("model")]


def _config(cfg: InputComparison, experiment: Experiment, inputs: str, seed: int) -> RunConfig:
    options = experiment.inputs.get(inputs)
    if options is None:
        remedy = did_you_mean(inputs, experiment.inputs)
        raise UserError("is no way to read this dataset", option="inputs", value=inputs, remedy=remedy)
    epochs = {} if cfg.epochs is None else {"training.epochs": cfg.epochs}
    given = dict(pair.split("=", 1) for pair in cfg.options.split("+") if pair)
    folder = str(Path(cfg.data) / experiment.data)
    own = {**experiment.common, **options, "data.folder": folder, "training.seed": seed, **epochs, **given}
    if inputs == AUTO:
        return configured(AUTO, own)
    made = configured(str(experiment.recipe), {**own, "name": f"{experiment.recipe}_{inputs}"})
    return made if inputs != BY_HAND else _measured_alike(made, folder)


def _measured_alike(by_hand: RunConfig, folder: str) -> RunConfig:
    """A recipe, tested on the events that `auto` tests on and by its protocol."""
    plain = to_plain(by_hand)
    alike = to_plain(configured(AUTO, {"data.folder": folder, "task.kind": by_hand.task.kind}))["task"]
    shared = {name: alike[name] for name in ("split", "evaluation") if name in plain["task"]}
    return from_plain(RunConfig, {**plain, "task": {**plain["task"], **shared}})


def _rounded(value: float) -> float | None:
    """None where a metric has no interval."""
    return round(value, 5) if math.isfinite(value) else None
