"""The OpenAPI description of the front, made from its endpoints."""

import re
from collections.abc import Mapping
from typing import Any

from nestrec.serving.api.answers import ProblemAnswer
from nestrec.serving.api.endpoint import JSON_TYPE, Endpoint
from nestrec.serving.api.schema import LimitsConfig
from nestrec.serving.api.shapes import Schema, json_schema

_WRONG = {
    "400": "the request is wrong: the field that is named, or the body as a whole",
    "401": "the server asks for a key, and none was given that it takes",
    "403": "the key is of a role that may not ask this",
    "408": "the body did not arrive in time",
    "413": "the body is too long",
    "415": "the content type is not application/json, or the body is compressed",
    "429": "more work waits than can be done in time",
    "503": "the server stops or starts, or the deadline has passed",
}
_COMES_BACK = ("429", "503")
_BY_KEY = ("401", "403")
_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}
_EITHER_OR_NONE: list[dict[str, list[str]]] = [{"bearer": []}, {"key": []}, {}]
"""none where the server asks for no keys"""


def openapi(endpoints: Mapping[str, Endpoint], limits: LimitsConfig) -> dict[str, Any]:
    """OpenAPI 3.1 of all routes."""
    named: dict[str, Schema] = {}
    problem = json_schema(ProblemAnswer, limits, named)
    paths: dict[str, dict[str, Any]] = {}
    for name, endpoint in endpoints.items():
        described = _operation(name, endpoint, limits, named, problem)
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {"title": "nestrec", "version": "1"},
        "paths": paths,
        "components": {"schemas": dict(sorted(named.items())), "securitySchemes": _SCHEMES},
    }


def _operation(
    name: str, endpoint: Endpoint, limits: LimitsConfig, named: dict[str, Schema], problem: Schema
) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": endpoint.summary}
    if endpoint.status != 204:
        schema = {"type": "string"} if endpoint.answer is None else json_schema(endpoint.answer, limits, named)
        answer["content"] = {endpoint.content_type: {"schema": schema}}
    found: dict[str, Any] = {"operationId": name, "summary": endpoint.summary}
    if endpoint.audience != "anyone":
        found["security"] = _EITHER_OR_NONE
    if parameters := re.findall(r"{(\w+)}", endpoint.path):
        found["parameters"] = [
            {"name": parameter, "in": "path", "required": True, "schema": {"type": "string"}}
            for parameter in parameters
        ]
    if endpoint.request is not None:
        body: dict[str, Any] = {"schema": json_schema(endpoint.request, limits, named)}
        if endpoint.example:
            body["example"] = dict(endpoint.example)
        found["requestBody"] = {"required": True, "content": {JSON_TYPE: body}}
    return {**found, "responses": {str(endpoint.status): answer, **_problems(endpoint, problem)}}


def _problems(endpoint: Endpoint, problem: Schema) -> dict[str, Any]:
    if endpoint.request is not None:
        statuses = tuple(_WRONG)
    else:
        statuses = ("400",) if "{" in endpoint.path else ()
        statuses += _BY_KEY if endpoint.audience != "anyone" else ()
    return {status: _problem(status, problem) for status in statuses}


def _problem(status: str, schema: Schema) -> dict[str, Any]:
    found: dict[str, Any] = {"description": _WRONG[status], "content": {JSON_TYPE: {"schema": schema}}}
    if status in _COMES_BACK:
        seconds = {"description": "seconds after which to come back", "schema": {"type": "integer", "minimum": 1}}
        found["headers"] = {"Retry-After": seconds}
    return found
