"""Admin routes reject what is sent by mistake or by an attacker with a 4xx, and nothing changes."""

import asyncio
import json

import httpx
import pytest

from nestrec.models.hstu import HSTUConfig
from nestrec.serving.core.request_limits import LimitsConfig
from nestrec.serving.fleet.gateway import Gateway
from nestrec.serving.http.http_app import App
from nestrec.serving.http.routes import all_endpoints
from nestrec.serving.model.request_inputs import row_of
from nestrec.serving.model.served_tables import TablesConfig
from nestrec.serving.service.inference_service import Service, ServiceConfig
from nestrec.serving.service.model_reloader import Reloader
from nestrec_bench.harness.random_model import random_ranking

ENCODER = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=16)
LONG = f'"{"a/" * 3_000}"'
WRONG_TYPES = ["null", "-1", "1e400", "9" * 400, "true", "[]", "{}", '["a"]', "NaN"]
NO_TEXT = [r'"\ud800"', '"a', '"\xff"', *WRONG_TYPES]
NO_ADDRESS = [r'"\u0000"', r'"models/\u0000"', r'"a\nb"', r'"\u007f"', '""', LONG, *NO_TEXT]
ABSENT = ['"../../../../../etc/passwd"', '"/dev/null"', '"."', '"~"', '"file:///"', '"memory://none"', '"nothing://x"',
          '"dir://x"', '"github://x"', '"x@abcdef"', f'"{"x" * 300}"']  # fmt: skip
NO_COUNT = ["-1", "1025", "1.5", "9" * 400, '"2"', r'"\u0000"', "null", "[]", "true"]


def with_values(template, values):
    """Return bodies that have each value in place of the star."""
    return [template.replace("*", value) for value in values]


BODIES = {
    "/v1/admin/swap": [
        *with_values('{"models": [*]}', NO_ADDRESS),
        *with_values('{"models": ["models/a", *, "models/abcdefghijk"]}', NO_ADDRESS),
        *with_values('{"models": *}', ["[]", *WRONG_TYPES]),
        *with_values('{"models": [*]}', ABSENT),
    ],
    "/v1/admin/rollback": with_values("*", ['{"to": "x"}', r'{"\u0000": 1}', "[]", '{"models": ["a"]}']),
    "/v1/admin/drain": with_values('{"drain": *}', ['"false"', "0", "[]", r'"\u0000"', "1e400"]),
    "/v1/items": [
        *with_values('{"items": [{"id": *}]}', ['""', LONG, *(text for text in NO_TEXT if text != "-1")]),
        *with_values('{"items": [{"id": "a", "title": *}]}', [LONG, "1", r'"\ud800"']),
        *with_values('{"items": [{"id": "a", "features": *}]}', ["[]", "1", '{"a": {}}', '{"a": [[1]]}']),
        *with_values('{"items": *}', ["[]", *WRONG_TYPES]),
    ],
}
"""By route of an instance; ABSENT addresses are valid, but nothing is stored there."""
FRONT_BODIES = {
    "/v1/admin/swap": with_values('{"models": [*]}', NO_ADDRESS),
    "/v1/admin/scale": with_values('{"instances": *}', ["0", *NO_COUNT]),
    "/v1/admin/drain": with_values('{"slot": *}', NO_COUNT),
    "/v1/admin/rollback": BODIES["/v1/admin/rollback"],
}


def refusals(app, bodies):
    """Return (status, message, body) of each."""

    async def run():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            found = []
            for path, contents in bodies.items():
                for content in contents:
                    sent = content.encode("latin-1")
                    answer = await client.post(path, content=sent, headers={"content-type": "application/json"})
                    found.append((answer.status_code, answer.text, path + " " + content[:80]))
            return found

    return asyncio.run(run())


@pytest.fixture(scope="module")
def service():
    service = Service({"ranking": random_ranking(ENCODER, num_items=20)}, ServiceConfig())
    yield service
    service.close()


def test_admin_routes_reject_invalid_names(service, caplog):
    admin_posts = {one.path for one in all_endpoints().values() if one.admin and one.method == "POST"}
    assert admin_posts == BODIES.keys(), "a new route needs its bodies here"
    reloader = Reloader(service, "cpu", TablesConfig())
    before = service.fleet("ranking").servable.version
    for status, text, asked in refusals(App(service, LimitsConfig(), reloader=reloader), BODIES):
        assert status in (400, 409), (status, asked)
        assert len(text) < 20_000, asked
        assert json.loads(text)["error"]["message"], asked
    reloader.close()
    assert service.fleet("ranking").servable.version == before
    assert not service.is_draining
    assert not caplog.records


def test_front_admin_routes_reject_invalid_names(caplog):
    gateway = Gateway([1], LimitsConfig())  # nothing listens there: what is valid would be answered late
    for status, text, asked in refusals(gateway, FRONT_BODIES):
        assert status == 400, (status, text, asked)
    assert not caplog.records


@pytest.mark.parametrize("category", ["x", "", "1.5", "9" * 400, "²", float("inf"), float("nan"), -1, 5, 10**400, None])
def test_row_of_invalid_category_is_unknown(category):
    assert row_of(category, num_rows=5) == 0
    assert [row_of(known, num_rows=5) for known in ("4", 4, 4.0, True)] == [4, 4, 4, 1]
