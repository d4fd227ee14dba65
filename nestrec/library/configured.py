"""The configuration of a run, from what a user names: a recipe, a config.json, or a config of their own."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from nestrec.base.config import from_plain, with_overrides
from nestrec.base.errors import UserError, did_you_mean
from nestrec.base.overriding import override_texts
from nestrec.data.dataset import Dataset
from nestrec.training.config import RunConfig
from nestrec.training.recipes import auto
from nestrec.training.recipes import recipe as named_recipe


def configured(recipe: str | Path | RunConfig, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """A named recipe, the config.json of an earlier run, or a config, with dotted overrides.

    Overrides are values, or text as on the command line. A recipe may make the synthetic logs it names; in a folder
    that the user names, a mistyped name would get them too.
    """
    texts = override_texts(overrides)
    if recipe == auto.NAME:
        return _automatic(texts)
    base = recipe if isinstance(recipe, RunConfig) else _named(str(recipe))
    own_folder = {"data.synthetic": "none"} if "data.folder" in texts else {}
    return _overridden(base, {**own_folder, **texts})


def _overridden(base: RunConfig, texts: dict[str, str]) -> RunConfig:
    """Returns the config with overrides; what is given loses the reason for which it was chosen."""
    reasons = {name: why for name, why in base.reasons.items() if name not in texts}
    return replace(with_overrides(base, texts), reasons=reasons)


def _automatic(texts: dict[str, str]) -> RunConfig:
    """The recipe that a dataset asks for; options that are given win, and lose the reason of what was chosen."""
    if "data.folder" not in texts:
        remedy = "name the dataset that `nestrec prepare` wrote: --data.folder data/mine"
        raise UserError("reads the card of a dataset", field="RECIPE", value=auto.NAME, remedy=remedy)
    given = dict(texts)
    kind = given.pop("task.kind", None)
    if kind is not None and kind not in get_args(auto.TaskKind):
        remedy = did_you_mean(kind, get_args(auto.TaskKind))
        raise UserError("is no task that it knows", field="task.kind", value=kind, remedy=remedy)
    has_own_split = any(name.startswith(("task.split.", "task.valid_share", "task.test_share")) for name in given)
    dataset = Dataset.open(texts["data.folder"])
    base = auto.auto(dataset, kind, has_own_split=has_own_split)  # type: ignore[arg-type]
    return _overridden(base, given)


def _named(name: str) -> RunConfig:
    if Path(name, "config.json").exists():
        remedy = f"to go on with it: nestrec train {name}/config.json --output {name}"
        raise UserError("is a run, not a recipe", field="RECIPE", value=name, remedy=remedy)
    return _saved_config(Path(name)) if name.endswith(".json") else named_recipe(name)


def _saved_config(file: Path) -> RunConfig:
    try:
        plain = json.loads(file.read_text())
        if not isinstance(plain, dict):
            raise ValueError("it holds no named fields")
        return from_plain(RunConfig, plain)
    except (OSError, ValueError, UserError) as error:
        remedy = "name a config.json that `nestrec train` wrote, or a recipe (see `nestrec recipes`)"
        raise UserError(f"cannot be read: {error}", field="RECIPE", value=str(file), remedy=remedy) from error
