"""Endpoints are declared once: requests are checked, OpenAPI and /docs are made, and answers are as they say."""

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
from nestrec.serving.http.http_app import App, handled
from nestrec.serving.http.routes import ENDPOINTS, all_endpoints, endpoint_seam
from nestrec.serving.inputs.request_schema import reader
from nestrec.serving.service.inference_service import Service, ServiceConfig
from nestrec_bench.harness.random_model import random_ranking, random_retrieval

ENCODER = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=32, time_bias=True)
PATIENT = EngineConfig(max_queue_s=1e9)
LIMITS = LimitsConfig(max_candidates=400, default_timeout_ms=10_000)
HISTORY = {"items": [1, 2], "times_ms": [1, 2], "actions": ["click", 2], "features": {"tab": ["home", None]}}
BODIES = {
    "titles": {"items": ["1", "no such item"], "search": "a"},
    "rank": {"user": "a", "history": HISTORY, "candidates": [3, "none"], "context": {"tab": "home"}, "unknown": "drop"},
    "preinfer": {"user": "a", "history": HISTORY},
    "recommend": {"user": "a", "history": HISTORY, "context": {"tab": "x"}, "exclude": [4], "allow": [3, 5, "none"]},
    "events": {"user": 7, "history": HISTORY},
}
DOCS = Path(__file__).parents[2] / "docs" / "serving.md"


@pytest.fixture(scope="module")
def service():
    models = {"retrieval": random_retrieval(ENCODER, num_items=30), "ranking": random_ranking(ENCODER, num_items=30)}
    service = Service(models, ServiceConfig(engine=PATIENT, preranked=10))
    yield service
    service.close()


@pytest.fixture(scope="module")
def front(service):
    return App(service, LIMITS)


@pytest.fixture(scope="module")
def described(front):
    return call(front, "GET", "/openapi.json").json()


def call(app, method, path, body=None):
    async def run():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.request(method, path, json=body)

    return asyncio.run(run())


def operation(described, name):
    return described["paths"][ENDPOINTS.find(name).path][ENDPOINTS.find(name).method.lower()]


def references(value):
    if isinstance(value, dict):
        yield from (inner for name, inner in value.items() if name == "$ref")
        for inner in value.values():
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def test_every_route_is_described_with_its_answer(described):
    for name in ENDPOINTS:
        endpoint = ENDPOINTS.find(name)
        found = operation(described, name)
        answer = found["responses"][str(endpoint.status)]
        assert endpoint.status == 204 or answer["content"][endpoint.content_type]["schema"], name
        assert ("requestBody" in found) == (endpoint.request is not None)
    schemas = described["components"]["schemas"]
    assert {reference.rpartition("/")[2] for reference in references(described)} <= schemas.keys()
    for name, schema in schemas.items():
        for field, inner in schema["properties"].items():
            assert inner.get("description"), f"{name}.{field} has no meaning"


ANSWERING = [name for name in ENDPOINTS if ENDPOINTS.find(name).method != "DELETE" and not ENDPOINTS.find(name).admin]


@pytest.mark.parametrize("name", ANSWERING)
def test_answers_are_as_they_are_described(front, described, name):
    endpoint = ENDPOINTS.find(name)
    found = operation(described, name)
    response = call(front, endpoint.method, endpoint.path, BODIES.get(name))
    assert response.status_code == endpoint.status, response.text
    ((content_type, media),) = found["responses"][str(endpoint.status)]["content"].items()
    assert response.headers["content-type"] == content_type
    value = response.json() if content_type == "application/json" else response.text
    check_schema(value, media["schema"], described)


@pytest.mark.parametrize("name", BODIES)
def test_refusals_are_as_they_are_described(front, described, name):
    found = operation(described, name)
    schema = found["responses"]["400"]["content"]["application/json"]["schema"]
    for body in ({}, {**BODIES[name], "more": 1}, {**BODIES[name], "user": None}):
        response = call(front, "POST", ENDPOINTS.find(name).path, body)
        assert response.status_code == 400
        check_schema(response.json(), schema, described)
    assert "Retry-After" in found["responses"]["429"]["headers"]


@pytest.mark.parametrize("name", BODIES)
def test_what_is_described_is_what_is_checked(described, name):
    body = operation(described, name)["requestBody"]["content"]["application/json"]
    endpoint = ENDPOINTS.find(name)
    read = reader(endpoint.request, LIMITS)
    for good in (BODIES[name], endpoint.example):
        check_schema(good, body["schema"], described)
        read(good)
    check_schema(body["example"], body["schema"], described)
    for wrong in ({**BODIES[name], "history": {"items": [0.5]}}, {**BODIES[name], "more": 1}, {}):
        with pytest.raises(AssertionError):
            check_schema(wrong, body["schema"], described)
        with pytest.raises(BadRequestError):
            read(wrong)


def test_limits_of_the_server_are_described(described):
    candidates = described["components"]["schemas"]["RankRequest"]["properties"]["candidates"]
    assert (candidates["minItems"], candidates["maxItems"]) == (1, 400)


class Links(HTMLParser):
    """What a page refers to, its anchors, and whether its tags close."""

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


def test_the_page_shows_all_of_it_and_needs_nothing_else(front, described):
    page = call(front, "GET", "/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    links = Links()
    links.feed(page.text)
    assert not links.open
    assert all(target.startswith(("/", "#")) for target in links.targets), "nothing is loaded from elsewhere"
    assert {target[1:] for target in links.targets if target.startswith("#")} <= links.anchors
    assert {
        operation["operationId"] for path in described["paths"].values() for operation in path.values()
    } <= links.anchors
    assert {f"schema-{name}" for name in described["components"]["schemas"]} <= links.anchors
    assert "only these are recommended" in page.text
    assert "curl -H &#x27;content-type: application/json&#x27; http://127.0.0.1:8000/v1/rank" in page.text


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package with the endpoint that the documents show, as an installer would leave it."""
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


def test_an_endpoint_of_another_package_is_checked_described_and_answered(service, installed):
    front = App(service, LIMITS, endpoints=all_endpoints(endpoint_seam()))
    for item, is_known in (("3", True), ("none", False)):
        response = call(front, "POST", "/v1/knows", {"item": item})
        assert (response.status_code, response.json()) == (200, {"is_known": is_known})
    for wrong in ({}, {"item": 0.5}, {"item": "3", "more": 1}):
        assert call(front, "POST", "/v1/knows", wrong).status_code == 400
    described = call(front, "GET", "/openapi.json").json()
    assert described["components"]["schemas"]["KnowsRequest"]["properties"]["item"]["description"] == "source id"
    assert "Does the model know an item" in call(front, "GET", "/docs").text
    assert 'route="/v1/knows",status="200"} 2.0' in call(front, "GET", "/metrics").text
    assert call(front, "GET", "/v1/knows").status_code == 405


def test_a_route_belongs_to_one_endpoint(installed):
    seam = endpoint_seam()
    knows = installed / "my_package" / "knows.py"
    knows.write_text(knows.read_text().replace("/v1/knows", "/v1/rank"))
    with pytest.raises(
        UserError, match=r"nestrec.endpoints: knows=/v1/rank: is the path of two(.|\n)*'my_package'"
    ):
        all_endpoints(seam)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    number: float | None = None
    """any"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    inner: Inner
    """another class"""
    inners: list[Inner] | None = None
    """several"""
    named: Mapping[str, Inner | int] | None = None
    """by name"""


def test_classes_inside_a_request_are_made_too():
    read = reader(Outer, LIMITS)
    assert read({"inner": {"number": 3}}) == Outer(inner=Inner(number=3))
    whole = {"inner": {}, "inners": [{"number": 1}, {}], "named": {"a": 1, "b": {"number": 2}}}
    inners, named = [Inner(number=1), Inner()], {"a": 1, "b": Inner(number=2)}
    assert read(whole) == Outer(inner=Inner(), inners=inners, named=named)
    for wrong, field in (
        ({}, "inner"),
        ({"inner": None}, "inner"),
        ({"inner": {"number": "3"}}, "inner.number"),
        ({"inner": {}, "inners": [{"no": 1}]}, "inners.no"),
        ({"inner": {"x" * 90: 1}}, "inner." + "x" * 64),
    ):
        with pytest.raises(BadRequestError) as refused:
            read(wrong)
        assert refused.value.field == field


def test_a_front_may_be_given_its_endpoints(service):
    models = {"models": replace(ENDPOINTS.find("models"), path="/about")}
    front = App(service, LIMITS, endpoints=models)
    assert json.loads(call(front, "GET", "/about").text)["models"].keys() == {"retrieval", "ranking"}
    assert call(front, "GET", "/v1/models").status_code == 404


def test_the_description_says_where_a_key_is_asked_for(described):
    assert set(described["components"]["securitySchemes"]) == {"bearer", "key"}
    for name in ENDPOINTS:
        found = operation(described, name)
        is_open = ENDPOINTS.find(name).audience == "anyone"
        assert ("security" in found) != is_open, name
        assert ({"401", "403"} <= set(found["responses"])) != is_open, name


class Two(TypedDict):
    """Two numbers."""

    first: int
    """one"""
    second: int
    """the other"""


async def _half(front: object, request: None) -> dict[str, int]:
    return {"first": 1}


async def _no_mapping(front: object, request: None) -> list[int]:
    return [1, 2]


async def _no_json(front: object, request: None) -> dict[str, object]:
    return {"first": object(), "second": 2}


def _at_once(front: object, request: None) -> dict[str, int]:
    return {"first": 1, "second": 2}


@pytest.mark.parametrize(
    ("handle", "said"),
    [
        (_half, r"gives \['first'\], where Two has \['first', 'second'\]"),
        (_no_mapping, "gives list, where Two has"),
        (_no_json, "gives what JSON cannot hold"),
        (_at_once, "gives dict and nothing to wait for: write it as `async def`"),
    ],
)
def test_an_answer_that_is_not_as_its_endpoint_says_is_never_sent(handle, said):
    endpoint = EndpointSpec(method="GET", path="/v1/two", summary="two", handle=handle, answer=Two)
    with pytest.raises(TypeError, match=rf"nestrec.endpoints: GET /v1/two: `handle` \({handle.__name__}\) {said}"):
        asyncio.run(handled(endpoint, None, None))


@dataclass
class Unheard:
    value: complex = 1j
    """no JSON"""


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"request": Unheard, "method": "POST"},
            r"endpoint=two: its request .*Unheard'> is not what JSON can hold",
        ),
        ({"answer": 3}, "its answer 3 is not what JSON can hold"),
        ({"path": "v1/two"}, "its path 'v1/two' does not begin with '/'"),
    ],
)
def test_an_endpoint_that_cannot_be_described_is_named_when_a_server_starts(monkeypatch, changes, said):
    endpoint = EndpointSpec(**{"method": "GET", "path": "/v1/two", "summary": "two", "handle": _half, **changes})
    seam = endpoint_seam()
    monkeypatch.setitem(seam._loaded, "two", endpoint)
    seam.__dict__["_foreign"] = {"two": EntryPoint("two", "theirs:TWO", seam.group)}
    with pytest.raises(UserError, match=said):
        all_endpoints(seam)
