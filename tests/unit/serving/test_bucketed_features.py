"""Bucketed numeric features: each value of a request is parsed independently of the others."""

from dataclasses import replace

import numpy as np
import pytest

from nestrec.base.errors import UserError
from nestrec.data.transform import Transform
from nestrec.models import HSTUConfig
from nestrec.serving.core.request_limits import LimitsConfig
from nestrec.serving.inputs.request_resolver import RequestNotes, RequestResolver
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.servable_spec import ColumnSpec
from nestrec.serving.service.cold_start_items import NewItem, NewItemInsertion
from nestrec_bench.harness.random_model import random_ranking

NAMES = ("up to 1", "above 1 to 2", "above 2")
BUCKETS = Transform(kind="quantiles", bounds=(1.0, 2.0, 3.0))


@pytest.fixture(scope="module")
def servable() -> Servable:
    """A model with the item feature `price` and the event feature `place`, both in three buckets."""
    model = random_ranking(HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=8), num_items=4)
    columns = tuple(
        ColumnSpec(name=name, keys=NAMES, num_rows=4, transform=BUCKETS) for name in ("item_price", "event_place")
    )
    return replace(model, spec=replace(model.spec, columns=(*model.spec.columns, *columns)))


def test_bucketed_feature_of_new_items_is_parsed_alone(servable: Servable) -> None:
    prices = [0.5, "1.5", "above 2", None, 9]
    growth = NewItemInsertion(servable, [NewItem(key=f"new {i}", features={"price": p}) for i, p in enumerate(prices)])
    assert growth._ids(servable.spec.columns[-2]).tolist() == [1, 2, 3, 0, 3]


@pytest.mark.parametrize("price", ["cheap", "nan", {"eur": 3}, [3]])
def test_bucketed_feature_rejects_text(servable: Servable, price: object) -> None:
    with pytest.raises(UserError, match=r"(?s)items.x.features.price=.*must be (a number|one value)"):
        NewItemInsertion(servable, [NewItem(key="x", features={"price": price})])


def test_bucketed_feature_values_are_parsed_independently(servable: Servable) -> None:
    notes = RequestNotes()
    values = [0.5, "1.5", "above 2", None, "far"]
    ids = RequestResolver(servable, LimitsConfig(), notes)._categories(
        values, len(values), servable.spec.columns[-1], "f"
    )
    np.testing.assert_array_equal(ids, [1, 2, 3, 0, 0])
    assert [note["ids"] for note in notes.to_response()["unknown_ids"]] == [["far"]]
