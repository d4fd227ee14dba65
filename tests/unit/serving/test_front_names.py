"""What fronts are told of a model that follows: names that have come, not the whole catalogue again."""

from dataclasses import replace

import pytest

from nestrec.models.hstu import HSTUConfig
from nestrec.serving.frontend.deployment_names import (
    DeploymentNameCache,
    DeploymentNumbers,
    NameSender,
    RemoteDeployment,
)
from nestrec.serving.model.servable import Servable
from nestrec_bench.harness.random_model import random_ranking

ENCODER = HSTUConfig(dim=4, num_layers=1, num_heads=1, head_dim=4, max_length=8)
NUM_ITEMS = 5000


def later(old: Servable, version: str, more: tuple[str, ...]) -> Servable:
    """As a delta leaves it: in the same memory, with one map of names, which has grown."""
    spec = replace(old.spec, num_items=old.spec.num_items + len(more))
    servable = replace(old, version=version, spec=spec, item_keys=(*old.item_keys, *more))
    old.item_ids.grow(more, len(old.item_keys))
    servable.__dict__["item_ids"] = old.item_ids
    return servable


@pytest.mark.parametrize("skipped", [False, True], ids=["every version", "a version nobody was told of"])
def test_a_front_is_told_the_items_that_came_and_nothing_that_it_knows(skipped: bool) -> None:
    tell = NameSender(DeploymentNumbers())
    known = DeploymentNameCache()
    first = RemoteDeployment(random_ranking(ENCODER, num_items=NUM_ITEMS), ())
    whole = tell.message({"ranking": first})
    known.take(whole)
    second = RemoteDeployment(later(first.servable, "second", ("a", "7000")), ())
    if not skipped:
        known.take(tell.message({"ranking": second}))
    third = RemoteDeployment(later(second.servable, "third", ("b",)), ())
    message = tell.message({"ranking": third})
    known.take(message)
    assert len(message) < len(whole) / 10
    told = known.in_service["ranking"].servable
    served = third.servable
    assert (told.version, told.item_keys) == (served.version, served.item_keys)
    assert told.spec.num_items == served.spec.num_items == NUM_ITEMS + 3
    asked = ["a", 7000, "b", "1", "nobody"]
    assert told.ids_of(asked).tolist() == served.ids_of(asked).tolist() == [5001, 5002, 5003, 1, 0]


def test_a_front_is_told_all_of_a_model_that_was_loaded_anew() -> None:
    tell = NameSender(DeploymentNumbers())
    known = DeploymentNameCache()
    first = RemoteDeployment(random_ranking(ENCODER, num_items=9), ())
    known.take(tell.message({"ranking": first}))
    anew = replace(first.servable, version="anew", item_keys=first.servable.item_keys[::-1])
    known.take(tell.message({"ranking": RemoteDeployment(anew, ())}))
    assert known.in_service["ranking"].servable.ids_of(["1", "9"]).tolist() == [9, 1]
