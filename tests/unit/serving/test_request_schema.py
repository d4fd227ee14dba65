"""Validation of requests: the message of each kind of error, and bounds that match the JSON schema."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest

from nestrec.base.config_values import NumberRange
from nestrec.serving.core.request_limits import BadRequestError, LimitsConfig
from nestrec.serving.inputs.request_schema import AtLeast, RankRequest, json_schema, reader

LIMITS = LimitsConfig(max_candidates=4, max_item_id_length=8, max_user_id_length=5)
VALID = {"user": "ann", "candidates": [1, "b"]}
RANK_FIELDS = (
    "user, candidates, history, prefer_stored_history, user_features, now_ms, timeout_ms, on_unknown, context, "
    "candidate_features"
)


def error_of(shape, data):
    with pytest.raises(BadRequestError) as error:
        reader(shape, LIMITS)(data)
    return f"{error.value.field}: {error.value.message}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"canddates": [1]}, f"canddates: unknown field; known fields: {RANK_FIELDS}"),
        ({"unknown": "drop"}, f"unknown: unknown field; did you mean on_unknown? Known fields: {RANK_FIELDS}"),
        ({"history": {"itms": [1]}}, "history.itms: unknown field; known fields: items, times_ms, actions, features"),
        ({"history": 3}, "history: must be an object"),
        ({"user": 1.5}, "user: must be text of 1 to 5 characters or an integer"),
        ({"user": "x" * 6}, "user: must be text of 1 to 5 characters"),
        ({"on_unknown": "maybe"}, "on_unknown: must be one of last, score, drop, reject"),
        ({"timeout_ms": 0}, "timeout_ms: must be an integer from 1 to 10000"),
        ({"timeout_ms": True}, "timeout_ms: must be an integer from 1 to 10000"),
        ({"prefer_stored_history": 1}, "prefer_stored_history: must be true or false"),
        ({"candidates": "12"}, "candidates: must be a list"),
        ({"candidates": []}, "candidates: must have at least 1 value"),
        ({"candidates": [1] * 5}, "candidates: must have at most 4 values"),
        (
            {"candidates": [1, None]},
            "candidates: must be a list of values, each text of 0 to 8 characters or an integer",
        ),
        ({"candidates": ["x" * 9, "y"]}, "candidates: must be text of 0 to 8 characters"),
        ({"history": {"times_ms": [5, -1]}}, "history.times_ms: must be an integer from 0 to 7258118400000"),
        ({"history": {"features": {"tab": "home"}}}, "history.features.tab: must be a list"),
        ({"context": {"tab": "x" * 4097}}, "context.tab: must be text of 0 to 4096 characters"),
    ],
)
def test_request_errors_name_field_and_expectation(change, message):
    assert error_of(RankRequest, {**VALID, **change}) == message


def test_request_errors_name_missing_field():
    assert error_of(RankRequest, {"user": "ann"}) == "candidates: is required"


@dataclass
class Part:
    size: Annotated[int, AtLeast(1)] = 1


@dataclass
class Product:
    share: Annotated[float, NumberRange(0, 0.5)] = 0
    name: Annotated[str, AtLeast(2)] = "ab"
    codes: list[Literal[1, 3]] | None = None
    parts: list[Part] | None = None
    by_name: Mapping[str, Part | list[Part] | None] | None = None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"share": 0.6}, "share: must be a number from 0 to 0.5"),
        ({"name": "a"}, "name: must be text of at least 2 characters"),
        ({"codes": [1, 2, 3]}, "codes: must be one of 1, 3"),
    ],
)
def test_request_bounds_of_schema_are_enforced(data, message):
    assert error_of(Product, data) == message


def test_request_bounds_of_schema_equal_those_of_types():
    named = {}
    json_schema(Product, LIMITS, named)
    properties = named["Product"]["properties"]
    assert properties["share"] == {"type": "number", "minimum": 0, "maximum": 0.5}
    assert properties["name"] == {"type": "string", "minLength": 2}
    assert properties["codes"]["anyOf"][0] == {"type": "array", "items": {"enum": [1, 3]}}


def test_request_nested_objects_are_dataclasses():
    data = {"share": 0.5, "parts": [{"size": 2}, {}], "by_name": {"a": {"size": 3}, "b": [{}], "c": None}}
    expected = Product(share=0.5, parts=[Part(2), Part()], by_name={"a": Part(3), "b": [Part()], "c": None})
    assert reader(Product, LIMITS)(data) == expected
    assert error_of(Product, {"by_name": {"a": [{"size": 0}]}}) == "by_name.a.size: must be an integer from 1"
