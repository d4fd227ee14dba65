"""Fuzzed and hostile request bodies: responses are never server errors, and nothing leaks."""

import asyncio
import json
import random

import httpx
import pytest

from nestrec.exporters.servable_writer import write_servable
from nestrec.models.hstu import HSTUConfig
from nestrec.serving.core.request_limits import LimitsConfig
from nestrec.serving.fleet.gateway import parse_routing_info
from nestrec.serving.http.http_app import App
from nestrec.serving.http.routes import all_endpoints
from nestrec.serving.model.served_tables import TablesConfig
from nestrec.serving.service.inference_service import Service, ServiceConfig
from nestrec.serving.service.model_reloader import Reloader
from nestrec_bench.harness.random_model import random_ranking, random_retrieval

ENCODER = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=32, time_bias=True)
PATHS = ["/v1/rank", "/v1/preinfer", "/v1/recommend", "/v1/events"]
FIELDS = ["user", "history", "user_features", "now_ms", "timeout_ms", "candidates", "candidate_features", "k",
          "exclude_seen", "exclude", "allow", "context", "on_unknown", "num_candidates", "items",
          "times_ms", "actions", "features", "tab", "nonsense"]  # fmt: skip


def random_value(rng, depth=0):
    """Return a random JSON value of any type."""
    leaf = [
        None,
        True,
        False,
        "drop",
        "score",
        "reject",
        0,
        1,
        -1,
        2**31,
        2**63,
        2**64,
        -(2**63) - 1,
        10**400,
        0.5,
        1e308,
        "",
        "1",
        "home",
        "x" * 300,
        "\u0000",
        "\ud7ff",
        "\u00e9" * 9,
        [],
        {},
    ]
    if depth < 3 and rng.random() < 0.35:
        if rng.random() < 0.5:
            return [random_value(rng, depth + 1) for _ in range(rng.randint(0, 6))]
        return {rng.choice(FIELDS): random_value(rng, depth + 1) for _ in range(rng.randint(0, 4))}
    return rng.choice(leaf)


def valid_body(rng, path):
    """Return a random valid body for a route."""
    count = rng.randint(0, 40)
    body = {
        "user": rng.choice(["a", "b", 7]),
        "history": {
            "items": [rng.choice([1, "2", "none", -5]) for _ in range(count)],
            "times_ms": sorted(rng.randint(0, 10**12) for _ in range(count)),
            "actions": [rng.choice([0, 3, "click", ["click", "like"], []]) for _ in range(count)],
            "features": {"tab": [rng.choice(["home", None, 3]) for _ in range(count)]},
        },
        "now_ms": rng.randint(0, 10**12),
    }
    if path == "/v1/events":
        return {"user": body["user"], "history": body["history"]}
    if path == "/v1/recommend":
        body |= {"exclude": [3, "none"], "allow": [*range(5, 40)]} if rng.random() < 0.5 else {}
    if path == "/v1/rank":
        body["candidates"] = [rng.randint(1, 60) for _ in range(rng.randint(1, 30))]
    if path in ("/v1/rank", "/v1/recommend"):
        body["context"] = {"tab": rng.choice(["home", "nowhere", None])}
    return {**body, "on_unknown": rng.choice(["last", "score", "drop", "reject"])} if rng.random() < 0.5 else body


def paths_of(value, path=()):
    """Yield the paths of a JSON value and of all values inside it."""
    yield path
    if isinstance(value, dict):
        children = value.items()
    elif isinstance(value, list):
        children = enumerate(value)
    else:
        children = ()
    for key, child in children:
        yield from paths_of(child, (*path, key))


def fuzzed_body(rng, path):
    """Return a random value, or a valid body with up to three random changes."""
    if rng.random() < 0.1:
        return random_value(rng)
    body = valid_body(rng, path)
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        *outer, last = rng.choice([p for p in paths_of(body) if p])
        target = body
        for key in outer:
            target = target[key]
        if rng.random() < 0.2 and isinstance(target, dict):
            del target[last]
            target[rng.choice(FIELDS)] = random_value(rng)
        else:
            target[last] = random_value(rng)
        if not isinstance(body.get("history", {}), dict):
            break
    if isinstance(body.get("history"), dict) and rng.random() < 0.2:  # events of the same user in several requests
        body["user"] = "a"
        body["history"][rng.choice(["items", "times_ms", "actions", "features"])] = None
    return body


@pytest.mark.parametrize("count", [1_500, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_fuzzed_requests_never_cause_server_errors(count, caplog):
    rng = random.Random(count)
    service = Service(
        {"retrieval": random_retrieval(ENCODER, num_items=50), "ranking": random_ranking(ENCODER, num_items=50)},
        ServiceConfig(num_retrieved=10),
    )
    app = App(service, LimitsConfig(max_history_events=60, max_candidates=40, default_timeout_ms=10_000))
    statuses = {}

    async def run():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            for _ in range(count):
                path = rng.choice(PATHS)
                content = json.dumps(fuzzed_body(rng, path)).encode("utf-8", "surrogatepass")
                response = await client.post(path, content=content, headers={"content-type": "application/json"})
                statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
                assert response.status_code in (200, 202, 400, 429, 503), (response.status_code, content)

    asyncio.run(run())
    assert statuses[200] > count // 20
    assert statuses[400] > count // 4
    for deployment in service.deployments.values():
        for engine in deployment.engines:
            assert engine.drain(30.0)
            engine.tiers.device.check()
            assert all(entry.pins == 0 for entry in engine.tiers.device.entries()), "a pinned entry leaked"
            assert engine.counts.get("failed", 0) == 0
    assert service.router.loads == [0]
    service.close()
    assert not caplog.records, "the log contains no part of a request"


# Bodies that a JSON library would not write; every POST route must reject them with a 4xx.

HOSTILE = "@hostile@"
"""Placeholder of a hostile token in a body that is otherwise valid."""
DEPTHS = [3, 100, 900, 1000, 1020, 1023, 1024, 1025, 5_000, 50_000]
NUMBERS = ["NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1e-400", "9" * 400, "-" + "9" * 5_000, "0x10", "00", "-",
           "-0", "1.", ".5", "1e", "+1", "9223372036854775808", "-9223372036854775809", "18446744073709551616",
           "0.1" + "0" * 3_000 + "1", "1E+2", "7258118400001", "True", "undefined"]  # fmt: skip
TEXTS = [rb'"\ud800"', rb'"\udc00\ud800"', b'"\xed\xa0\x80"', b'"\xff\xfe"', b'"\xc3("', b'"\xf8\x88\x80\x80\x80"',
         rb'"\u0000"', b'"\x00"', b'"\n"', rb'"\x41"', rb'"\u12"', b'"', b"'a'", b'"' + b"x" * 70_000 + b'"',
         rb'"\u202e"', b'"\xef\xbb\xbf"', b'"../../../etc/passwd"', b'"' + b"a/" * 3_000 + b'"']  # fmt: skip
LIST_VALUES = [b"0", b'"1"', b"null", b'"click"', b"-5", b"1e3", b"[]", b"{}", b"true", b"1", b'""', b'"\xff"']


def hostile_list(rng):
    """Return a long list, which may have mixed types or end wrongly."""
    first = rng.choice(LIST_VALUES)
    other = rng.choice(LIST_VALUES)
    values = [first] * rng.choice([15, 16, 17, 800, 2_000, 30_000])
    if rng.random() < 0.5:
        values[rng.randrange(len(values))] = other
    if rng.random() < 0.2:
        values = [b'"w%d"' % i for i in range(len(values))]
    return b"[" + rng.choice([b",", b" , ", b",\n"]).join(values) + rng.choice([b"]", b"]", b"]", b",]", b"", b"]]"])


def hostile_nesting(rng):
    depth = rng.choice(DEPTHS)
    start, end = rng.choice([(b"[", b"]"), (b'{"a":', b"}"), (b'{"a":[', b"]}"), (b"[[],", b"]")])
    content = rng.choice([b"1", b"", hostile_list(rng), b'{"a":' + hostile_list(rng) + b"}"])
    return start * depth + content + end * rng.choice([depth, depth, depth, depth - 1, 0])


def hostile_token(rng):
    makers = (lambda: rng.choice(NUMBERS).encode(), lambda: rng.choice(TEXTS))
    return rng.choice([*makers, lambda: hostile_list(rng), lambda: hostile_nesting(rng)])()


def valid_body_for(rng, path):
    match path:
        case "/v1/admin/swap":
            return {"models": [rng.choice(["models/none", "", ".", "a\u0000b", "x" * 5_000, "memory://none"])]}
        case "/v1/admin/drain":
            return {"drain": rng.random() < 0.5}
        case "/v1/admin/rollback":
            return {}
        case "/v1/items":
            features = rng.choice([{}, {"tab": "x"}, {"topic": random_value(rng)}])
            return {"items": [{"id": rng.choice([1, 51, "", "\u0000"]), "features": features, "title": "t"}]}
        case "/v1/titles":
            return {"items": [1, "2"], "search": "a"}
        case _:
            return valid_body(rng, path)


def with_token(rng, body, token):
    """Return a body as JSON with a token in place of a random value."""
    *outer, last = rng.choice([p for p in paths_of(body) if p] or [("extra",)])
    target = body
    for key in outer:
        target = target[key]
    target[last] = HOSTILE
    return json.dumps(body).encode().replace(b'"%s"' % HOSTILE.encode(), token)


def mutated(rng, content):
    """Return bytes with up to four random replacements, deletions, repetitions or insertions."""
    content = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(content) + 1)
        match rng.randrange(4):
            case 0:
                content[start : start + 1] = rng.randbytes(1)
            case 1:
                del content[start : start + rng.randint(1, 20)]
            case 2:
                content[start:start] = content[start : start + rng.randint(1, 40)]
            case _:
                content[start:start] = rng.choice(
                    [b"\x00", b"\xff", b"\xef\xbb\xbf", b"{", b"]", b'"', b"\\", b",", b":"]
                )
    return bytes(content)


def with_duplicate_name(rng, body):
    name = rng.choice([*body, "history", "user", "models"])
    separator = b"," if body else b""
    return json.dumps(body).encode()[:-1] + separator + b'"%s":%s}' % (name.encode(), hostile_token(rng))


def in_other_encoding(rng, content):
    encoding = rng.choice(["utf-8-sig", "utf-16", "utf-32", "utf-16-le", "utf-7"])
    return content.decode().encode(encoding) + rng.choice([b"", b"{}", b"\x00", b" \n"])


def with_wrong_types(rng, path):
    return json.dumps(fuzzed_body(rng, path) if path in PATHS else random_value(rng)).encode("utf-8", "surrogatepass")


def hostile_body(rng, path):
    body = valid_body_for(rng, path)
    content = json.dumps(body).encode()
    makers = [
        lambda: content,
        lambda: content[: rng.randrange(len(content))],
        lambda: mutated(rng, content),
        lambda: hostile_token(rng),
        lambda: with_token(rng, body, hostile_token(rng)),
        lambda: with_token(rng, body, hostile_nesting(rng)),
        lambda: with_duplicate_name(rng, body),
        lambda: in_other_encoding(rng, content),
        lambda: with_wrong_types(rng, path),
    ]
    return rng.choice(makers)()


@pytest.fixture(scope="module")
def admin_app(tmp_path_factory):
    """Return an application whose models can be swapped."""
    root = tmp_path_factory.mktemp("models")
    write_servable(random_retrieval(ENCODER, num_items=50), root / "retrieval")
    write_servable(random_ranking(ENCODER, num_items=50), root / "ranking")
    cfg = ServiceConfig(num_retrieved=10, session_timeout_s=0.0)
    service = Service.load([root / "retrieval", root / "ranking"], cfg)
    reloader = Reloader(service, "cpu", TablesConfig())
    limits = LimitsConfig(max_history_events=3_000, max_candidates=1_000, default_timeout_ms=10_000)
    yield App(service, limits, reloader=reloader)
    reloader.close()
    service.close()


@pytest.mark.parametrize("count", [1_000, pytest.param(20_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_hostile_bodies_never_get_a_5xx(admin_app, count, caplog):
    rng = random.Random(count)
    statuses = {}
    paths = sorted(endpoint.path for endpoint in all_endpoints().values() if endpoint.method == "POST")

    async def run():
        headers = {"content-type": "application/json"}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(admin_app), base_url="http://test") as client:
            for number in range(count):
                path = paths[number % len(paths)]
                content = hostile_body(rng, path)
                parse_routing_info(path, content, admin_app.context.limits)  # as a gateway parses it
                found = []
                if rng.random() < 0.5:  # ASGI, or the fast path without ASGI
                    found.append((await client.post(path, content=content, headers=headers)).status_code)
                else:
                    await admin_app.serve(path, "", content, lambda reply: found.append(reply.status))  # noqa: B023
                (status,) = found
                statuses[status] = statuses.get(status, 0) + 1
                is_late = status == 503 and b"timeout_ms" in content  # the body may set a deadline that is too short
                assert status < 500 or is_late, (status, path, len(content), content[:300], content[-100:])

    asyncio.run(run())
    assert statuses[400] > count // 2
    assert sum(statuses.get(status, 0) for status in (200, 202)) > count // 50
    assert not caplog.records, "the log contains no part of a request"
