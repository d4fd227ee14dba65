"""Endpoint declarations: validation of requests, OpenAPI, the page /docs, and responses that match their schema."""

import asyncio
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TypedDict

import httpx
import pytest
from schema_check import check_schema

from nestrec.base.errors import UserError
from nestrec.models.hstu import HSTUConfig
from nestrec.serving.core.request_limits import BadRequestError, LimitsConfig
from nestrec.serving.engine.batch_scheduler import EngineConfig
from nestrec.serving.http.endpoint_spec import EndpointSpec
from nestrec.serving.http.http_app import App, run_endpoint
from nestrec.serving.http.routes import ENDPOINTS, all_endpoints, endpoint_seam
from nestrec.serving.inputs.request_schema import reader
from nestrec.serving.service.inference_service import Service, ServiceConfig
from nestrec_bench.harness.random_model import random_ranking, random_retrieval

ENCODER = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=32, time_bias=True)
NO_SHEDDING = EngineConfig(max_queue_delay_s=1e9)
LIMITS = LimitsConfig(max_candidates=400, default_timeout_ms=10_000)
HISTORY = {"items": [1, 2], "times_ms": [1, 2], "actions": ["click", 2], "features": {"tab": ["home", None]}}
BODIES = {
    "titles": {"items": ["1", "no such item"], "search": "a"},
    "rank": {
        "user": "a",
        "history": HISTORY,
        "candidates": [3, "none"],
        "context": {"tab": "home"},
        "on_unknown": "drop",
    },
    "preinfer": {"user": "a", "history": HISTORY},
    "recommend": {"user": "a", "history": HISTORY, "context": {"tab": "x"}, "exclude": [4], "allow": [3, 5, "none"]},
    "events": {"user": 7, "history": HISTORY},
}
DOCS = Path(__file__).parents[2] / "docs" / "serving.md"


@pytest.fixture(scope="module")
def service():
    models = {"retrieval": random_retrieval(ENCODER, num_items=30), "ranking": random_ranking(ENCODER, num_items=30)}
    service = Service(models, ServiceConfig(engine=NO_SHEDDING, num_retrieved=10))
    yield service
    service.close()


@pytest.fixture(scope="module")
def app(service):
    return App(service, LIMITS)


@pytest.fixture(scope="module")
def openapi(app):
    return call(app, "GET", "/openapi.json").json()


def call(app, method, path, body=None):
    async def run():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.request(method, path, json=body)

    return asyncio.run(run())


def operation(openapi, name):
    return openapi["paths"][ENDPOINTS.find(name).path][ENDPOINTS.find(name).method.lower()]


def references(value):
    if isinstance(value, dict):
        yield from (inner for name, inner in value.items() if name == "$ref")
        for inner in value.values():
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def test_openapi_describes_every_route(openapi):
    for name in ENDPOINTS:
        endpoint = ENDPOINTS.find(name)
        found = operation(openapi, name)
        response = found["responses"][str(endpoint.status)]
        assert endpoint.status == 204 or response["content"][endpoint.content_type]["schema"], name
        assert ("requestBody" in found) == (endpoint.request is not None)
    schemas = openapi["components"]["schemas"]
    assert {reference.rpartition("/")[2] for reference in references(openapi)} <= schemas.keys()
    for name, schema in schemas.items():
        for field, inner in schema["properties"].items():
            assert inner.get("description"), f"{name}.{field} has no description"


WITH_RESPONSE = [
    name for name in ENDPOINTS if ENDPOINTS.find(name).method != "DELETE" and not ENDPOINTS.find(name).admin
]


@pytest.mark.parametrize("name", WITH_RESPONSE)
def test_openapi_schema_matches_responses(app, openapi, name):
    endpoint = ENDPOINTS.find(name)
    found = operation(openapi, name)
    response = call(app, endpoint.method, endpoint.path, BODIES.get(name))
    assert response.status_code == endpoint.status, response.text
    ((content_type, media),) = found["responses"][str(endpoint.status)]["content"].items()
    assert response.headers["content-type"] == content_type
    value = response.json() if content_type == "application/json" else response.text
    check_schema(value, media["schema"], openapi)


@pytest.mark.parametrize("name", BODIES)
def test_openapi_schema_matches_error_responses(app, openapi, name):
    found = operation(openapi, name)
    schema = found["responses"]["400"]["content"]["application/json"]["schema"]
    for body in ({}, {**BODIES[name], "more": 1}, {**BODIES[name], "user": None}):
        response = call(app, "POST", ENDPOINTS.find(name).path, body)
        assert response.status_code == 400
        check_schema(response.json(), schema, openapi)
    assert "Retry-After" in found["responses"]["429"]["headers"]


@pytest.mark.parametrize("name", BODIES)
def test_openapi_schema_matches_validation(openapi, name):
    body = operation(openapi, name)["requestBody"]["content"]["application/json"]
    endpoint = ENDPOINTS.find(name)
    read = reader(endpoint.request, LIMITS)
    for valid in (BODIES[name], endpoint.example):
        check_schema(valid, body["schema"], openapi)
        read(valid)
    check_schema(body["example"], body["schema"], openapi)
    for wrong in ({**BODIES[name], "history": {"items": [0.5]}}, {**BODIES[name], "more": 1}, {}):
        with pytest.raises(AssertionError):
            check_schema(wrong, body["schema"], openapi)
        with pytest.raises(BadRequestError):
            read(wrong)


def test_openapi_contains_limits_of_server(openapi):
    candidates = openapi["components"]["schemas"]["RankRequest"]["properties"]["candidates"]
    assert (candidates["minItems"], candidates["maxItems"]) == (1, 400)


class LinkParser(HTMLParser):
    """Parser that collects the link targets and anchors of a page, and checks that its tags are closed."""

    def __init__(self):
        super().__init__()
        self.targets = []
        self.anchors = set()
        self.open = []

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.targets += [found[name] for name in ("href", "src") if name in found]
        self.anchors |= {found["id"]} if "id" in found else set()
        if tag not in ("meta", "html"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert tag == "html" or self.open.pop() == tag


def test_openapi_page_is_self_contained(app, openapi):
    page = call(app, "GET", "/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    links = LinkParser()
    links.feed(page.text)
    assert not links.open
    assert all(target.startswith(("/", "#")) for target in links.targets), "the page loads nothing from other hosts"
    assert {target[1:] for target in links.targets if target.startswith("#")} <= links.anchors
    assert {
        operation["operationId"] for path in openapi["paths"].values() for operation in path.values()
    } <= links.anchors
    assert {f"schema-{name}" for name in openapi["components"]["schemas"]} <= links.anchors
    assert "the only items that can be recommended" in page.text
    assert "curl -H &#x27;content-type: application/json&#x27; http://127.0.0.1:8000/v1/rank" in page.text


@pytest.fixture
def installed_plugin(tmp_path, monkeypatch):
    """Install a package with the endpoint of docs/serving.md, and return its folder."""
    python, toml = re.search(
        r"## Endpoints of your own.*?```python\n(.*?)```.*?```toml\n(.*?)```", DOCS.read_text(), re.S
    ).groups()
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").touch()
    (tmp_path / "my_package" / "knows.py").write_text(python)
    information = tmp_path / "my_package-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1\n")
    group, entry = re.search(r'entry-points\."([\w.]+)"\]\n(.*)', toml).groups()
    (information / "entry_points.txt").write_text(f"[{group}]\n{entry.replace(chr(34), '')}\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_package"]:
        del sys.modules[name]


def test_endpoint_plugin_is_validated_and_served(service, installed_plugin):
    app = App(service, LIMITS, endpoints=all_endpoints(endpoint_seam()))
    for item, is_known in (("3", True), ("none", False)):
        response = call(app, "POST", "/v1/knows", {"item": item})
        assert (response.status_code, response.json()) == (200, {"is_known": is_known})
    for wrong in ({}, {"item": 0.5}, {"item": "3", "more": 1}):
        assert call(app, "POST", "/v1/knows", wrong).status_code == 400
    openapi = call(app, "GET", "/openapi.json").json()
    assert openapi["components"]["schemas"]["KnowsRequest"]["properties"]["item"]["description"] == "source id"
    assert "Does the model know an item" in call(app, "GET", "/docs").text
    assert 'route="/v1/knows",status="200"} 2.0' in call(app, "GET", "/metrics").text
    assert call(app, "GET", "/v1/knows").status_code == 405


def test_endpoint_routes_are_unique(installed_plugin):
    seam = endpoint_seam()
    knows = installed_plugin / "my_package" / "knows.py"
    knows.write_text(knows.read_text().replace("/v1/knows", "/v1/rank"))
    with pytest.raises(
        UserError, match=r"nestrec.endpoints: knows=/v1/rank: the endpoint 'rank' has the same path(.|\n)*'my_package'"
    ):
        all_endpoints(seam)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    number: float | None = None
    """Any number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    inner: Inner
    """Nested object."""
    inners: list[Inner] | None = None
    """List of nested objects."""
    named: Mapping[str, Inner | int] | None = None
    """Nested objects or integers by name."""


def test_request_reader_builds_nested_dataclasses():
    read = reader(Outer, LIMITS)
    assert read({"inner": {"number": 3}}) == Outer(inner=Inner(number=3))
    full = {"inner": {}, "inners": [{"number": 1}, {}], "named": {"a": 1, "b": {"number": 2}}}
    inners = [Inner(number=1), Inner()]
    named = {"a": 1, "b": Inner(number=2)}
    assert read(full) == Outer(inner=Inner(), inners=inners, named=named)
    for wrong, field in (
        ({}, "inner"),
        ({"inner": None}, "inner"),
        ({"inner": {"number": "3"}}, "inner.number"),
        ({"inner": {}, "inners": [{"no": 1}]}, "inners.no"),
        ({"inner": {"x" * 90: 1}}, "inner." + "x" * 64),
    ):
        with pytest.raises(BadRequestError) as error:
            read(wrong)
        assert error.value.field == field


def test_app_serves_only_the_endpoints_it_gets(service):
    models = {"models": replace(ENDPOINTS.find("models"), path="/about")}
    app = App(service, LIMITS, endpoints=models)
    assert json.loads(call(app, "GET", "/about").text)["models"].keys() == {"retrieval", "ranking"}
    assert call(app, "GET", "/v1/models").status_code == 404


def test_openapi_describes_authentication(openapi):
    assert set(openapi["components"]["securitySchemes"]) == {"bearer", "key"}
    for name in ENDPOINTS:
        found = operation(openapi, name)
        is_open = ENDPOINTS.find(name).audience == "anyone"
        assert ("security" in found) != is_open, name
        assert ({"401", "403"} <= set(found["responses"])) != is_open, name


class Two(TypedDict):
    """Two numbers."""

    first: int
    """First number."""
    second: int
    """Second number."""


async def _missing_field(app: object, request: None) -> dict[str, int]:
    return {"first": 1}


async def _list(app: object, request: None) -> list[int]:
    return [1, 2]


async def _not_json(app: object, request: None) -> dict[str, object]:
    return {"first": object(), "second": 2}


def _not_async(app: object, request: None) -> dict[str, int]:
    return {"first": 1, "second": 2}


@pytest.mark.parametrize(
    ("handle", "message"),
    [
        (_missing_field, r"returns \['first'\], but Two requires the fields \['first', 'second'\]"),
        (_list, "returns list, but Two requires the fields"),
        (_not_json, "returns a value that cannot be converted to JSON"),
        (_not_async, "returns dict, which cannot be awaited; use `async def`"),
    ],
)
def test_endpoint_invalid_response_is_never_sent(handle, message):
    endpoint = EndpointSpec(method="GET", path="/v1/two", summary="two", handle=handle, response=Two)
    with pytest.raises(TypeError, match=rf"nestrec.endpoints: GET /v1/two: `handle` \({handle.__name__}\) {message}"):
        asyncio.run(run_endpoint(endpoint, None, None))


@dataclass
class ComplexRequest:
    value: complex = 1j
    """Complex number, which JSON cannot represent."""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"request": ComplexRequest, "method": "POST"},
            r"endpoint=two: its request .*ComplexRequest'> cannot be represented in JSON",
        ),
        ({"response": 3}, "its response 3 cannot be represented in JSON"),
        ({"path": "v1/two"}, "its path 'v1/two' does not start with '/'"),
    ],
)
def test_endpoint_without_schema_is_rejected_at_start(monkeypatch, changes, message):
    endpoint = EndpointSpec(
        **{"method": "GET", "path": "/v1/two", "summary": "two", "handle": _missing_field, **changes}
    )
    seam = endpoint_seam()
    monkeypatch.setitem(seam._loaded, "two", endpoint)
    seam.__dict__["_external"] = {"two": EntryPoint("two", "theirs:TWO", seam.group)}
    with pytest.raises(UserError, match=message):
        all_endpoints(seam)
