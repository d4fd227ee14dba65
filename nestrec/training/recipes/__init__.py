"""Named recipes: each name stands for a complete run configuration, which dotted overrides can change."""

from collections.abc import Callable

from nestrec.base.errors import UserError, did_you_mean
from nestrec.training.recipes import dataset_recipes, movielens_recipes
from nestrec.training.run_config import RunConfig

RECIPES: dict[str, Callable[[], RunConfig]] = {
    **dataset_recipes.DEMO_RECIPES,
    **dataset_recipes.RANKING_RECIPES,
    **dataset_recipes.AMAZON_RECIPES,
    **movielens_recipes.MOVIELENS_RECIPES,
    **dataset_recipes.KUAIRAND_RECIPES,
    **dataset_recipes.CRITEO_RECIPES,
}


def recipe(name: str) -> RunConfig:
    """Return the configuration of a named recipe.

    Raises:
        UserError: If there is no such recipe.
    """
    if name == "auto":
        remedy = (
            "use it with a dataset: nestrec train auto --data.folder data/mine; its options are those of demo, ranking "
            "or criteo_dlrm"
        )
        raise UserError("this recipe is derived from a dataset", option="RECIPE", value=name, remedy=remedy)
    if name not in RECIPES:
        remedy = f"{did_you_mean(name, ['auto', *RECIPES])} (auto chooses a model for a dataset of your own)"
        raise UserError("no such recipe", option="RECIPE", value=name, remedy=remedy)
    return RECIPES[name]()


__all__ = ["RECIPES", "recipe"]
