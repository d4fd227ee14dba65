import json

import pytest
import torch

from nestrec.base.config import dumps, to_plain
from nestrec.base.config_overrides import apply_overrides
from nestrec.base.config_values import from_plain
from nestrec.base.errors import UserError
from nestrec.models.backbone_registry import make_encoder
from nestrec.models.dlrm import DLRM, DLRMConfig
from nestrec.training.recipes import RECIPES, recipe
from nestrec.training.run_config import RunConfig

PUBLISHED = ["beauty_sasrec", "beauty_hstu", "ml_1m_hstu", "ml_1m_hstu_large", "ml_100k_hstu"]


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_has_its_name_and_round_trips_through_json(name: str) -> None:
    cfg = recipe(name)
    assert cfg.name == name
    assert from_plain(RunConfig, json.loads(dumps(cfg))) == cfg


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_model_can_be_built(name: str) -> None:
    encoder = recipe(name).task.encoder
    with torch.device("meta"):
        model = DLRM(encoder) if isinstance(encoder, DLRMConfig) else make_encoder(encoder)
    assert sum(p.numel() for p in model.parameters()) > 1000


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_mistyped_option_gets_a_suggestion(name: str) -> None:
    with pytest.raises(UserError, match=r"Did you mean --optimizer.learning_rate"):
        apply_overrides(recipe(name), {"optimizer.learnin_rate": "1"})
    with pytest.raises(UserError, match=r"Did you mean --task.encoder.dim"):
        apply_overrides(recipe(name), {"task.encodr.dim": "8"})
    with pytest.raises(UserError, match="must be of type int"):
        apply_overrides(recipe(name), {"training.epochs": "many"})


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_fields_can_all_be_overridden(name: str) -> None:
    """Overriding each field with its own value, as typed on a command line, does not change the config."""
    cfg = recipe(name)
    assert apply_overrides(cfg, dict(leaves("", to_plain(cfg)))) == cfg


def leaves(where: str, node: object) -> list[tuple[str, str]]:
    if isinstance(node, dict):
        return [leaf for name, inner in node.items() for leaf in leaves(f"{where}.{name}".strip("."), inner)]
    return [(where, node if isinstance(node, str) else json.dumps(node))]


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipe_of_published_results_exists(name: str) -> None:
    assert recipe(name).data.prepare_command.startswith("nestrec prepare ")


def test_recipe_unknown_name_gets_a_suggestion() -> None:
    with pytest.raises(UserError, match=r"[Dd]id you mean 'ml_1m_hstu'"):
        recipe("ml_1m_hstuu")


def test_saved_config_with_unknown_field_is_rejected() -> None:
    plain = to_plain(recipe("demo"))
    plain["training"]["epoch"] = 3
    with pytest.raises(UserError, match=r"training\.epoch=3: TrainingConfig has no such field"):
        from_plain(RunConfig, plain)
