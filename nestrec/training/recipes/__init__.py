"""Named recipes: a name gives a whole run configuration, which dotted overrides then change."""

from collections.abc import Callable

from nestrec.base.errors import UserError, did_you_mean
from nestrec.training.config import RunConfig
from nestrec.training.recipes import amazon, criteo, demo, kuairand, movielens, ranking

RECIPES: dict[str, Callable[[], RunConfig]] = {
    **demo.RECIPES,
    **ranking.RECIPES,
    **amazon.RECIPES,
    **movielens.RECIPES,
    **kuairand.RECIPES,
    **criteo.RECIPES,
}


def recipe(name: str) -> RunConfig:
    """The configuration of a named recipe."""
    if name == "auto":
        remedy = "nestrec train auto --data.folder data/mine; its options are those of demo, ranking or criteo_dlrm"
        raise UserError("is made from the card of a dataset", field="RECIPE", value=name, remedy=remedy)
    if name not in RECIPES:
        remedy = f"{did_you_mean(name, ['auto', *RECIPES])} (auto chooses a model for a dataset of your own)"
        raise UserError("no such recipe", field="RECIPE", value=name, remedy=remedy)
    return RECIPES[name]()


__all__ = ["RECIPES", "recipe"]
