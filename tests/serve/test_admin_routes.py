"""Admin routes reject invalid and hostile bodies with a 4xx, and nothing changes."""

import asyncio
import json

import httpx
import pytest

from nestrec.models.hstu import HSTUConfig
from nestrec.serving.core.request_limits import LimitsConfig
from nestrec.serving.fleet.gateway import Gateway
from nestrec.serving.http.http_app import App
from nestrec.serving.http.routes import all_endpoints
from nestrec.serving.model.request_inputs import category_row
from nestrec.serving.model.served_tables import TablesConfig
from nestrec.serving.service.inference_service import Service, ServiceConfig
from nestrec.serving.service.model_reloader import Reloader
from nestrec_bench.harness.random_model import random_ranking

ENCODER = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=16)
LONG = f'"{"a/" * 3_000}"'
WRONG_TYPES = ["null", "-1", "1e400", "9" * 400, "true", "[]", "{}", '["a"]', "NaN"]
INVALID_TEXTS = [r'"\ud800"', '"a', '"\xff"', *WRONG_TYPES]
INVALID_ADDRESSES = [r'"\u0000"', r'"models/\u0000"', r'"a\nb"', r'"\u007f"', '""', LONG, *INVALID_TEXTS]
ABSENT = ['"../../../../../etc/passwd"', '"/dev/null"', '"."', '"~"', '"file:///"', '"memory://none"', '"nothing://x"',
          '"dir://x"', '"github://x"', '"x@abcdef"', f'"{"x" * 300}"']  # fmt: skip
INVALID_COUNTS = ["-1", "1025", "1.5", "9" * 400, '"2"', r'"\u0000"', "null", "[]", "true"]


def with_values(template, values):
    """Return one body per value, which replaces the star in the template."""
    return [template.replace("*", value) for value in values]


BODIES = {
    "/v1/admin/swap": [
        *with_values('{"models": [*]}', INVALID_ADDRESSES),
        *with_values('{"models": ["models/a", *, "models/abcdefghijk"]}', INVALID_ADDRESSES),
        *with_values('{"models": *}', ["[]", *WRONG_TYPES]),
        *with_values('{"models": [*]}', ABSENT),
    ],
    "/v1/admin/rollback": with_values("*", ['{"to": "x"}', r'{"\u0000": 1}', "[]", '{"models": ["a"]}']),
    "/v1/admin/drain": with_values('{"drain": *}', ['"false"', "0", "[]", r'"\u0000"', "1e400"]),
    "/v1/items": [
        *with_values('{"items": [{"id": *}]}', ['""', LONG, *(text for text in INVALID_TEXTS if text != "-1")]),
        *with_values('{"items": [{"id": "a", "title": *}]}', [LONG, "1", r'"\ud800"']),
        *with_values('{"items": [{"id": "a", "features": *}]}', ["[]", "1", '{"a": {}}', '{"a": [[1]]}']),
        *with_values('{"items": *}', ["[]", *WRONG_TYPES]),
    ],
}
"""Invalid bodies by route of an instance; ABSENT addresses are valid, but nothing is stored there."""
GATEWAY_BODIES = {
    "/v1/admin/swap": with_values('{"models": [*]}', INVALID_ADDRESSES),
    "/v1/admin/scale": with_values('{"instances": *}', ["0", *INVALID_COUNTS]),
    "/v1/admin/drain": with_values('{"slot": *}', INVALID_COUNTS),
    "/v1/admin/rollback": BODIES["/v1/admin/rollback"],
}


def send_all(app, bodies):
    """Send all bodies; return the status, the response text and the route with the beginning of the body of each."""

    async def run():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            found = []
            for path, contents in bodies.items():
                for content in contents:
                    body = content.encode("latin-1")
                    response = await client.post(path, content=body, headers={"content-type": "application/json"})
                    found.append((response.status_code, response.text, path + " " + content[:80]))
            return found

    return asyncio.run(run())


@pytest.fixture(scope="module")
def service():
    service = Service({"ranking": random_ranking(ENCODER, num_items=20)}, ServiceConfig())
    yield service
    service.close()


def test_admin_routes_reject_invalid_bodies(service, caplog):
    admin_posts = {one.path for one in all_endpoints().values() if one.admin and one.method == "POST"}
    assert admin_posts == BODIES.keys(), "add invalid bodies for the new route to BODIES"
    reloader = Reloader(service, "cpu", TablesConfig())
    before = service.deployment("ranking").servable.version
    for status, text, request in send_all(App(service, LimitsConfig(), reloader=reloader), BODIES):
        assert status in (400, 409), (status, request)
        assert len(text) < 20_000, request
        assert json.loads(text)["error"]["message"], request
    reloader.close()
    assert service.deployment("ranking").servable.version == before
    assert not service.is_draining
    assert not caplog.records


def test_gateway_admin_routes_reject_invalid_bodies(caplog):
    gateway = Gateway([1], LimitsConfig())  # nothing listens on port 1: a valid request would fail only after a while
    for status, text, request in send_all(gateway, GATEWAY_BODIES):
        assert status == 400, (status, text, request)
    assert not caplog.records


@pytest.mark.parametrize(
    "category", ["x", "", "1.5", "9" * 400, "\u00b2", float("inf"), float("nan"), -1, 5, 10**400, None]
)
def test_category_row_of_invalid_value_is_unknown(category):
    assert category_row(category, num_rows=5) == 0
    assert [category_row(known, num_rows=5) for known in ("4", 4, 4.0, True)] == [4, 4, 4, 1]
