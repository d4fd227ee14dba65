"""Ablation of model inputs: datasets with ids only and with their features, and recipes against `train auto`.

Each run has its own folder, and finished runs are not trained again: several commands may train parts of a comparison
at the same time, and a command with all parts then collects them.
"""

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nestrec.api import resolve_config, train
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
Evaluation = Mapping[str, Any]
"""Content of the evaluation file of a run's test set, with the run's `name` and `task`."""
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Experiment:
    """A dataset with several choices of model inputs."""

    recipe: str | None
    """Recipe to train; None if only `auto` is trained."""
    inputs: Mapping[str, Options]
    """Name of a choice of inputs to its options."""
    metrics: tuple[str, ...] = ()
    """Metrics to report. Empty: the metric that selects the best epoch."""
    common: Options = field(default_factory=dict)
    """Options of all runs."""
    folder: str = ""
    """Folder of the prepared dataset. Empty: that of the recipe."""

    @property
    def data_folder(self) -> str:
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
            "prefix": {**KUAIRAND_FEATURES, "task.inputs.user_feature_mode": "prefix"},
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
        {**_BY_TIME, "task.evaluation.ks": (10, 50), "task.evaluation.main_metric": "ndcg@50"},
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
    """Experiments to run."""
    inputs: tuple[str, ...] = ()
    """Choices of inputs. Empty: all choices of the experiment."""
    data: str = "data"
    """Folder of the prepared datasets."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Seeds with which every choice of inputs is trained."""
    epochs: Count | None = None
    """Maximum number of epochs. None: that of the recipe."""
    options: str = ""
    """Options of all runs, as OPTION=VALUE joined by +."""
    output: str = "runs/features"
    """Folder of the run folders."""


def find_experiment(name: str) -> Experiment:
    """Return the experiment of a name, or raise a UserError that lists the known names."""
    if name not in EXPERIMENTS:
        raise UserError("unknown experiment", option="what", value=name, remedy=did_you_mean(name, EXPERIMENTS))
    return EXPERIMENTS[name]


def train_runs(cfg: InputComparison, name: str) -> dict[str, list[Path]]:
    """Train the runs of an experiment that are not finished, and return the run folders per choice of inputs."""
    found: dict[str, list[Path]] = {}
    for seed in cfg.seeds:
        for inputs in cfg.inputs or find_experiment(name).inputs:
            run = Path(cfg.output) / f"{name}-{inputs}-{seed}"
            if not (run / "eval" / "test.json").exists():
                train(_config(cfg, find_experiment(name), inputs, seed), output=run)
            found.setdefault(inputs, []).append(run)
    return found


def load_evaluation(run: Path) -> Evaluation:
    """Read the evaluation of a run on its test set."""
    run_config = json.loads((run / "config.json").read_text())
    evaluation = read_evaluation(run / "eval" / "test.json")
    return {**evaluation, "name": run_config["name"], "task": run_config["task"]["kind"]}


def evaluation_rows(name: str, experiment: Experiment, found: Mapping[str, Sequence[Evaluation]]) -> Iterator[Row]:
    """Yield rows with means over seeds; `low` and `high` are the means of the 95% intervals over users."""
    first = next(iter(found.values()))
    systems = {
        (inputs, system): (system, evaluations)
        for inputs, evaluations in found.items()
        for system in _model_systems(evaluations[0])
    }
    baselines = [system for system in first[0]["metrics"] if system not in _model_systems(first[0])]
    systems |= {("", system): (system, first) for system in baselines}
    for (inputs, shown), (system, evaluations) in systems.items():
        slices = evaluations[0].get("slices", {})
        parts = {"all": [one["metrics"] for one in evaluations]}
        parts |= {part: [one["slices"][part]["metrics"] for one in evaluations] for part in SLICES if part in slices}
        for part, metrics in parts.items():
            for metric in experiment.metrics or (first[0]["headline"],):
                values = [m[system][metric] for m in metrics if metric in m.get(system, {})]
                if values:
                    value, low, high = (statistics.fmean(column) for column in zip(*values, strict=True))
                    yield {
                        "dataset": name,
                        "task": evaluations[0]["task"],
                        "inputs": shown.replace("model", inputs),
                        "part": part,
                        "events": slices[part]["count"] if part != "all" else None,
                        "seeds": len(values),
                        "metric": metric,
                        "value": round(value, 5),
                        "low": _rounded(low),
                        "high": _rounded(high),
                        "of_seeds": [round(v[0], 5) for v in values],
                    }


def _model_systems(evaluation: Evaluation) -> list[str]:
    return [system for system in evaluation["metrics"] if system.startswith("model")]


def _config(cfg: InputComparison, experiment: Experiment, inputs: str, seed: int) -> RunConfig:
    options = experiment.inputs.get(inputs)
    if options is None:
        remedy = did_you_mean(inputs, experiment.inputs)
        raise UserError("unknown inputs of this dataset", option="inputs", value=inputs, remedy=remedy)
    epochs = {} if cfg.epochs is None else {"training.epochs": cfg.epochs}
    common = dict(pair.split("=", 1) for pair in cfg.options.split("+") if pair)
    folder = str(Path(cfg.data) / experiment.data_folder)
    own = {**experiment.common, **options, "data.folder": folder, "training.seed": seed, **epochs, **common}
    if inputs == AUTO:
        return resolve_config(AUTO, own)
    run_config = resolve_config(str(experiment.recipe), {**own, "name": f"{experiment.recipe}_{inputs}"})
    return run_config if inputs != BY_HAND else _with_auto_evaluation(run_config, folder)


def _with_auto_evaluation(by_hand: RunConfig, folder: str) -> RunConfig:
    """Return a recipe's config with the test set and the evaluation protocol of `auto`."""
    plain = to_plain(by_hand)
    automatic = to_plain(resolve_config(AUTO, {"data.folder": folder, "task.kind": by_hand.task.kind}))["task"]
    shared = {name: automatic[name] for name in ("split", "evaluation") if name in plain["task"]}
    return from_plain(RunConfig, {**plain, "task": {**plain["task"], **shared}})


def _rounded(value: float) -> float | None:
    """Round a bound of an interval; None if the metric does not have an interval."""
    return round(value, 5) if math.isfinite(value) else None
