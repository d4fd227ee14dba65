"""Frontend workers of a model that follows versions receive only new item names, not the full catalog."""

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


def later_version(old: Servable, version: str, more: tuple[str, ...]) -> Servable:
    """Return the model after a delta: same memory and the same item id map, with more items."""
    spec = replace(old.spec, num_items=old.spec.num_items + len(more))
    servable = replace(old, version=version, spec=spec, item_keys=(*old.item_keys, *more))
    old.item_ids.grow(more, len(old.item_keys))
    servable.__dict__["item_ids"] = old.item_ids
    return servable


@pytest.mark.parametrize("skipped", [False, True], ids=["every_version", "skipped_version"])
def test_frontend_names_receives_only_new_items(skipped: bool) -> None:
    sender = NameSender(DeploymentNumbers())
    known = DeploymentNameCache()
    first = RemoteDeployment(random_ranking(ENCODER, num_items=NUM_ITEMS), ())
    full_message = sender.message({"ranking": first})
    known.apply(full_message)
    second = RemoteDeployment(later_version(first.servable, "second", ("a", "7000")), ())
    if not skipped:
        known.apply(sender.message({"ranking": second}))
    third = RemoteDeployment(later_version(second.servable, "third", ("b",)), ())
    message = sender.message({"ranking": third})
    known.apply(message)
    assert len(message) < len(full_message) / 10
    received = known.in_service["ranking"].servable
    served = third.servable
    assert (received.version, received.item_keys) == (served.version, served.item_keys)
    assert received.spec.num_items == served.spec.num_items == NUM_ITEMS + 3
    keys = ["a", 7000, "b", "1", "unknown"]
    assert received.ids_of(keys).tolist() == served.ids_of(keys).tolist() == [5001, 5002, 5003, 1, 0]


def test_frontend_names_receives_all_of_reloaded_model() -> None:
    sender = NameSender(DeploymentNumbers())
    known = DeploymentNameCache()
    first = RemoteDeployment(random_ranking(ENCODER, num_items=9), ())
    known.apply(sender.message({"ranking": first}))
    reloaded = replace(first.servable, version="reloaded", item_keys=first.servable.item_keys[::-1])
    known.apply(sender.message({"ranking": RemoteDeployment(reloaded, ())}))
    assert known.in_service["ranking"].servable.ids_of(["1", "9"]).tolist() == [9, 1]
