import json

import pytest
import torch

from nestrec.base.config import dumps, to_plain
from nestrec.base.config_overrides import with_overrides
from nestrec.base.config_values import from_plain
from nestrec.base.errors import UserError
from nestrec.models.backbone_registry import make_encoder
from nestrec.models.dlrm import DLRM, DLRMConfig
from nestrec.training.recipes import RECIPES, recipe
from nestrec.training.run_config import RunConfig

PUBLISHED = ["beauty_sasrec", "beauty_hstu", "ml_1m_hstu", "ml_1m_hstu_large", "ml_100k_hstu"]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_carries_its_name_and_comes_back_from_json(name: str) -> None:
    cfg = recipe(name)
    assert cfg.name == name
    assert from_plain(RunConfig, json.loads(dumps(cfg))) == cfg


@pytest.mark.parametrize("name", RECIPES)
def test_the_model_of_a_recipe_can_be_made(name: str) -> None:
    encoder = recipe(name).task.encoder
    with torch.device("meta"):
        model = DLRM(encoder) if isinstance(encoder, DLRMConfig) else make_encoder(encoder)
    assert sum(p.numel() for p in model.parameters()) > 1000


@pytest.mark.parametrize("name", RECIPES)
def test_a_mistyped_option_says_what_was_meant(name: str) -> None:
    with pytest.raises(UserError, match=r"did you mean 'optimizer.learning_rate'"):
        with_overrides(recipe(name), {"optimizer.learnin_rate": "1"})
    with pytest.raises(UserError, match=r"did you mean 'task.encoder.dim'"):
        with_overrides(recipe(name), {"task.encodr.dim": "8"})
    with pytest.raises(UserError, match="is not of type int"):
        with_overrides(recipe(name), {"training.epochs": "many"})


@pytest.mark.parametrize("name", RECIPES)
def test_every_field_can_be_given_as_an_override(name: str) -> None:
    """Its own value, written as on a command line, changes nothing."""
    cfg = recipe(name)
    assert with_overrides(cfg, dict(leaves("", to_plain(cfg)))) == cfg


def leaves(where: str, node: object) -> list[tuple[str, str]]:
    if isinstance(node, dict):
        return [leaf for name, inner in node.items() for leaf in leaves(f"{where}.{name}".strip("."), inner)]
    return [(where, node if isinstance(node, str) else json.dumps(node))]


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipes_named_in_the_results_exist(name: str) -> None:
    assert recipe(name).data.prepare.startswith("nestrec prepare ")


def test_an_unknown_recipe_says_what_was_meant() -> None:
    with pytest.raises(UserError, match="did you mean 'ml_1m_hstu'"):
        recipe("ml_1m_hstuu")


def test_an_unknown_field_of_a_saved_config_is_refused() -> None:
    plain = to_plain(recipe("demo"))
    plain["training"]["epoch"] = 3
    with pytest.raises(UserError, match=r"training\.epoch=3: TrainingConfig has no such field"):
        from_plain(RunConfig, plain)
