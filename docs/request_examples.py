"""Generates the reference of the HTTP API, with examples in curl and Python, from the OpenAPI document of a server."""

import dataclasses
import json
import sys
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from markdown.extensions.toc import slugify

from nestrec.client import Client
from nestrec.serving.core.request_limits import LimitsConfig
from nestrec.serving.http.endpoint_spec import EndpointSpec
from nestrec.serving.http.pages import openapi
from nestrec.serving.http.routes import all_endpoints

sys.path.append(str(Path(__file__).parent))
from markdown_text import code, escaped, page, table

URL = "http://127.0.0.1:8000"
_NEW_USER = {"id": "ann"}


def examples(described: dict[str, Any], methods: set[str]) -> Iterator[tuple[str, str, str, str]]:
    """Yield the title, summary, curl command and Python code of each operation.

    Args:
        described: The OpenAPI document.
        methods: Methods of the client, which have the names of operations. Other operations get no Python code.
    """
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            name = operation["operationId"]
            content = operation.get("requestBody", {}).get("content", {}).get("application/json")
            body = None if content is None else content.get("example", {})
            arguments = {p["name"]: _NEW_USER[p["name"]] for p in operation.get("parameters", []) if p["in"] == "path"}
            called = _python(name, {**arguments, **(body or {})}) if name in methods else ""
            yield (
                f"{method.upper()} {path}",
                operation["summary"],
                _curl(method, path.format(**arguments), body),
                called,
            )


def requests_page() -> str:
    """Return the reference of the HTTP API: endpoints, errors, and the schemas of requests and responses."""
    endpoints = all_endpoints()
    described = openapi(endpoints, LimitsConfig())
    defaults = _defaults_of(endpoint.request for endpoint in endpoints.values() if endpoint.request is not None)
    schemas = described["components"]["schemas"]
    parts = [
        "# HTTP API",
        "This page describes every route of `nestrec serve`, from the OpenAPI description of a server (`GET "
        "/openapi.json`; `GET /docs` shows it as a page, with the limits of that server). The Python examples need "
        "`pip install '.[client]'` in a clone; see [clients](../clients.md). Plugins can add routes.",
        "Requests and responses are JSON; the content type of a request must be `application/json`. A field that a "
        "request schema does not have is an error. An API key is sent as `Authorization: Bearer KEY` or `X-API-Key: "
        "KEY`.",
        _overview(described, endpoints),
        "## Errors",
        "The body of an error is an `ErrorResponse`: a message, the field that is invalid, and a remedy. The Python "
        "client retries a request after 429 and 503 until its deadline, and waits for the seconds in `Retry-After`. "
        "After 503 it retries only idempotent requests, because the server may have processed the request.",
        _errors(described),
    ]
    for (title, summary, curl, called), operation in zip(
        examples(described, set(dir(Client))), _operations(described), strict=True
    ):
        parts += [f"## {title}", f"{summary}.", *_bodies(operation, schemas, defaults), f"```sh\n{curl}\n```"]
        if called:
            parts.append(f"```python\n{called}\n```")
    parts += ["## Routes of a gateway", _GATEWAY, "## Schemas"]
    parts += [f"### {name}\n\n{_fields(schema, defaults.get(name, {}))}" for name, schema in schemas.items()]
    return page(*parts)


def _operations(described: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for operations in described["paths"].values():
        yield from operations.values()


def _overview(described: dict[str, Any], endpoints: Mapping[str, EndpointSpec]) -> str:
    rows = []
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            endpoint = endpoints[operation["operationId"]]
            audience = "admins" if endpoint.admin else endpoint.audience
            link = f"[`{method.upper()} {path}`](#{_anchor(f'{method} {path}')})"
            rows.append([link, _ROLES[audience], escaped(operation["summary"])])
    return table(["route", "role of the API key", "purpose"], rows)


_ROLES = {"anyone": "none required", "clients": "public, admin", "watchers": "monitor, admin", "admins": "admin"}


def _anchor(title: str) -> str:
    return slugify(title, "-")


def _errors(described: dict[str, Any]) -> str:
    found: dict[str, Any] = {}
    for operation in _operations(described):
        found |= {status: response for status, response in operation["responses"].items() if status >= "400"}
    rows = [
        [status, escaped(error["description"]), "yes, after `Retry-After` seconds" if "headers" in error else "no"]
        for status, error in sorted((found | _OTHER_ERRORS).items())
    ]
    return table(["status", "meaning", "retry"], rows)


_GATEWAY = (
    "A gateway (`--load_balancer gateway`) forwards the routes above to its instances. It answers the health checks "
    "and `/metrics` itself, and has these routes in addition: `GET /v1/gateway` (role monitor) returns the status of "
    "the gateway, `POST /v1/admin/scale` (role admin) starts or stops instances, and `POST /v1/admin/drain` drains the "
    "instance that the field `slot` names."
)

_OTHER_ERRORS = {
    "404": {"description": "No such route, or the server has no model that serves it."},
    "405": {"description": "The route requires another method; the header Allow names it."},
    "431": {"description": "The path or the headers are too long."},
    "500": {"description": "The server failed to process the request; the log contains the reason."},
}
"""Statuses that do not depend on the route, which OpenAPI descriptions do not list."""


def _bodies(operation: dict[str, Any], schemas: dict[str, Any], defaults: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the fields of the request, the status of the response, and its fields."""
    if "requestBody" in operation:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        name = schema["$ref"].rpartition("/")[2]
        yield f"**Request**: {_type(schema)}"
        yield _fields(schemas[name], defaults.get(name, {}))
    (status, response), *_ = operation["responses"].items()
    content = [f"{_type(media['schema'])} (`{kind}`)" for kind, media in response.get("content", {}).items()]
    yield f"**Response**: `{status}`, {', '.join(content) or 'without a body'}"
    for media in response.get("content", {}).values():
        if "$ref" in media["schema"]:
            yield _fields(schemas[media["schema"]["$ref"].rpartition("/")[2]], {})


def _fields(schema: dict[str, Any], defaults: dict[str, Any]) -> str:
    """Return the table of the fields of a schema; `defaults` are those of a request."""
    required = schema.get("required", ())
    rows = []
    for name, field in schema.get("properties", {}).items():
        if name in required:
            need = "required"
        else:
            default = defaults.get(name)
            need = "optional" if default is None else f"default {code(json.dumps(default))}"
        rows.append([code(name), _type(field), need, escaped(field.get("description", ""))])
    return table(["field", "type", "required or default", "meaning"], rows) if rows else "This schema has no fields."


def _type(schema: dict[str, Any]) -> str:
    """Return a short description of a schema as Markdown."""
    return " or ".join(dict.fromkeys(_alternatives(schema)))


def _alternatives(schema: dict[str, Any]) -> list[str]:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return [f"[{name}](#{_anchor(name)})"]
    if "anyOf" in schema:
        parts = [one for part in schema["anyOf"] for one in _alternatives(part)]
        is_scalar = {"integer", "number", "boolean"} <= set(parts)
        others = [
            part for part in parts if part not in ("integer", "number", "boolean") and not part.startswith("string")
        ]
        return ["value", *others] if is_scalar else parts
    if "enum" in schema:
        return [code(json.dumps(choice)) for choice in schema["enum"]]
    kind = schema.get("type", "any value")
    return kind if isinstance(kind, list) else [_described(kind, schema)]


def _described(kind: str, schema: dict[str, Any]) -> str:
    if kind == "array":
        return f"list of {_grouped(schema['items'])}{_bounds(schema, 'minItems', 'maxItems')}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"mapping of names to {_grouped(schema['additionalProperties'])}"
    limits = ("minLength", "maxLength") if kind == "string" else ("minimum", "maximum")
    return f"{kind}{_bounds(schema, *limits)}"


def _grouped(schema: dict[str, Any]) -> str:
    """Return the type of the elements of a list or mapping, in parentheses if there are several."""
    text = _type(schema)
    return f"({text})" if " or " in text else text


def _bounds(schema: dict[str, Any], low: str, high: str) -> str:
    unit = {"maxItems": " elements", "maxLength": " characters"}.get(high, "")
    of = " of" if unit else ""
    if high in schema:
        limit = f"{schema[high]:,}{unit}"
        return f"{of or ' from'} {schema[low]:,} to {limit}" if low in schema else f"{of} at most {limit}"
    return f"{of} at least {schema[low]:,}{unit}" if low in schema else ""


def _defaults_of(classes: Iterable[Any]) -> dict[str, dict[str, Any]]:
    """Return the default values of the fields of request classes and of the classes that they contain."""
    found: dict[str, dict[str, Any]] = {}
    for cls in classes:
        if cls.__name__ not in found:
            fields = dataclasses.fields(cls)
            found[cls.__name__] = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
            found |= _defaults_of(
                _classes_in(hint) for hint in typing.get_type_hints(cls).values() if _classes_in(hint)
            )
    return found


def _classes_in(hint: Any) -> Any:
    """Return the first dataclass inside a type hint, or None."""
    if dataclasses.is_dataclass(hint):
        return hint
    return next((found for part in typing.get_args(hint) if (found := _classes_in(part)) is not None), None)


def _curl(method: str, path: str, body: Any) -> str:
    if body is None:
        return f"curl {'' if method == 'get' else f'-X {method.upper()} '}{URL}{path}"
    return f"curl -H 'content-type: application/json' {URL}{path} \\\n  -d '{_json(body, 2)}'"


def _json(value: Any, indent: int) -> str:
    """Return JSON in which long mappings and lists of mappings have one line per entry."""
    text = json.dumps(value)
    is_list = isinstance(value, list) and any(isinstance(each, dict) for each in value)
    if len(text) + indent <= _WIDTH or not (is_list or isinstance(value, dict)):
        return text
    pad = " " * (indent + 2)
    if is_list:
        entries = [f"{pad}{_json(each, indent + 2)}" for each in value]
    else:
        entries = [f"{pad}{json.dumps(name)}: {_json(inner, indent + 2)}" for name, inner in value.items()]
    first, last = "[]" if is_list else "{}"
    return "\n".join([first, ",\n".join(entries), " " * indent + last])


_WIDTH = 84
"""Maximum width of the examples."""


def _python(name: str, arguments: dict[str, Any]) -> str:
    columns = arguments.get("history", {})  # the client takes them as arguments of their own
    plain = {argument: value for argument, value in arguments.items() if argument != "history"}
    passed = [f"{argument}={value!r}" for argument, value in {**plain, **columns}.items()]
    called = f"    response = client.{name}({', '.join(passed)})"
    if len(called) > _WIDTH:
        called = "\n".join([f"    response = client.{name}(", *(f"        {each}," for each in passed), "    )"])
    return f'from nestrec.client import Client\n\nwith Client("{URL}") as client:\n{called}'
