"""OpenAPI description of the server, API documentation at /docs, and the live page.

The OpenAPI description is generated from the specs of the endpoints, and the page at /docs from that description. The
live page shows charts, the latest requests and a form to try requests. Each page is one file without external
resources. The Content-Security-Policy of the live page allows only its own script and style, by their SHA-256, so that
the content of a response can never be executed.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from html import escape
from importlib import resources
from typing import Any

from nestrec.serving.core.asgi import Header
from nestrec.serving.core.request_limits import LimitsConfig
from nestrec.serving.http.endpoint_spec import JSON_TYPE, EndpointSpec
from nestrec.serving.inputs.request_schema import Schema, json_schema
from nestrec.serving.inputs.responses import ErrorResponse

_DOCS_STYLE = """body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem;color:#1a1a2e;
background:#fff}h1{font-size:1.3rem}h2{font-size:1.05rem;margin-top:2.2rem;border-top:1px solid #d5d8e0;
padding-top:1rem}h3{font-size:.95rem;margin-bottom:.3rem}code,pre{font:13px/1.45 ui-monospace,monospace}
pre{background:#f3f4f8;padding:.7rem 1rem;border-radius:8px;white-space:pre-wrap;
overflow-wrap:anywhere}.method{display:inline-block;min-width:4rem;
font-weight:600}table{border-collapse:collapse;width:100%}td,th{text-align:left;vertical-align:top;
padding:.25rem .8rem .25rem 0;border-bottom:1px solid #e6e8ee}th{font-weight:600}a{color:#2b59c3}
@media(prefers-color-scheme:dark){body{background:#14161c;color:#e6e8ee}pre{background:#1e212b}
h2,td,th{border-color:#3a3f4d}a{color:#8fb0ff}}"""
_REFERENCE = "#/components/schemas/"


def docs_page(described: dict[str, Any]) -> bytes:
    """Return the HTML page of an OpenAPI description."""
    return "".join(_page(described)).encode()


def _page(described: dict[str, Any]) -> Iterator[str]:
    title = escape(described["info"]["title"])
    yield f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}: HTTP API</title>'
    yield f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_DOCS_STYLE}</style>'
    yield f'<h1>{title}: HTTP API</h1><p>OpenAPI description: <a href="/openapi.json">/openapi.json</a>. '
    yield 'Served models: <a href="/v1/models">/v1/models</a>. Status: <a href="/">live page</a>.</p>'
    operations = [
        (path, method, operation)
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
    ]
    yield "<ul>"
    for path, method, operation in operations:
        link = f'<a href="#{escape(operation["operationId"])}"><code>{escape(path)}</code></a>'
        yield f'<li><span class="method">{method.upper()}</span> {link} {escape(operation["summary"])}</li>'
    yield "</ul>"
    for path, method, operation in operations:
        yield from _operation_html(path, method, operation, described["components"]["schemas"])
    yield "<h2>Schemas</h2>"
    for name, schema in described["components"]["schemas"].items():
        yield f'<h3 id="schema-{escape(name)}">{escape(name)}</h3>{_fields(schema)}'
    yield "</html>"


def _operation_html(path: str, method: str, operation: dict[str, Any], schemas: dict[str, Any]) -> Iterator[str]:
    heading = f'<span class="method">{method.upper()}</span> <code>{escape(path)}</code>'
    yield f'<h2 id="{escape(operation["operationId"])}">{heading}</h2><p>{escape(operation["summary"])}.</p>'
    if "requestBody" in operation:
        body = operation["requestBody"]["content"]["application/json"]
        if "example" in body:
            yield f"<pre>{escape(_curl(path, body['example']))}</pre>"
        yield f"<h3>Request</h3>{_fields(_resolved(body['schema'], schemas))}"
    (status, response), *errors = operation["responses"].items()
    content = "; ".join(f"{_type(media['schema'])}, {kind}" for kind, media in response.get("content", {}).items())
    yield f"<h3>Response</h3><p><code>{escape(status)}</code> {content or 'without a body'}</p>"
    for media in response.get("content", {}).values():
        schema = _resolved(media["schema"], schemas)
        yield _fields(schema) if "properties" in schema else ""
    if errors:
        yield "<h3>Errors</h3><table>"
        for status, error in errors:
            headers = "".join(f"; header {escape(name)}" for name in error.get("headers", {}))
            yield f"<tr><td><code>{escape(status)}</code></td><td>{escape(error['description'])}{headers}</td></tr>"
        yield "</table>"


def _resolved(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    resolved: dict[str, Any] = schemas[schema["$ref"].removeprefix(_REFERENCE)] if "$ref" in schema else schema
    return resolved


def _curl(path: str, example: Any) -> str:
    body = json.dumps(example).replace("'", "'\\''")
    return f"curl -H 'content-type: application/json' http://127.0.0.1:8000{path} \\\n  -d '{body}'"


def _fields(schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    rows = []
    for name, field in schema.get("properties", {}).items():
        is_required = "yes" if name in required else ""
        description = escape(field.get("description", ""))
        rows.append(f"<tr><td><code>{escape(name)}</code></td><td>{_type(field)}</td><td>{is_required}</td>")
        rows.append(f"<td>{description}</td></tr>")
    return f"<table><tr><th>Field</th><th>Type</th><th>Required</th><th>Description</th></tr>{''.join(rows)}</table>"


def _type(schema: dict[str, Any]) -> str:
    """Return a short description of a schema as HTML."""
    if "$ref" in schema:
        name = escape(schema["$ref"].removeprefix(_REFERENCE))
        return f'<a href="#schema-{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(_type(part) for part in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"<code>{escape(json.dumps(choice))}</code>" for choice in schema["enum"])
    kind = schema.get("type", "anything")
    return " or ".join(map(escape, kind)) if isinstance(kind, list) else _plain_type(kind, schema)


def _plain_type(kind: str, schema: dict[str, Any]) -> str:
    match kind:
        case "array":
            return f"list of {_type(schema['items'])}{_bounds(schema, 'minItems', 'maxItems')}"
        case "object" if isinstance(schema.get("additionalProperties"), dict):
            return f"mapping from names to {_type(schema['additionalProperties'])}"
        case "string":
            return f"string{_bounds(schema, 'minLength', 'maxLength')}"
        case _:
            return escape(kind) + _bounds(schema, "minimum", "maximum")


def _bounds(schema: dict[str, Any], low: str, high: str) -> str:
    if high in schema:
        return f" ({schema.get(low, 0):,} to {schema[high]:,})"
    return f" ({schema[low]:,} or more)" if low in schema else ""


_ERRORS = {
    "400": "The request is invalid; the response names the field, unless the whole body is invalid.",
    "401": "The server requires an API key, and the request has no valid one.",
    "403": "The role of the API key is not authorized for this endpoint.",
    "408": "The request body did not arrive in time.",
    "413": "The request body is too large.",
    "415": "The content type is not application/json, or the body is compressed.",
    "429": "The server is overloaded, or the client exceeds its rate limit; retry later.",
    "503": "The server is starting or shutting down, or the deadline of the request passed; retry later.",
}
_RETRYABLE = ("429", "503")
_AUTH_ERRORS = ("401", "403")
_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}
_SECURITY: list[dict[str, list[str]]] = [{"bearer": []}, {"key": []}, {}]
"""Alternatives to authenticate; the last one is for a server that does not require API keys."""


def openapi(endpoints: Mapping[str, EndpointSpec], limits: LimitsConfig) -> dict[str, Any]:
    """Return the OpenAPI 3.1 description of all endpoints."""
    named: dict[str, Schema] = {}
    problem = json_schema(ErrorResponse, limits, named)
    paths: dict[str, dict[str, Any]] = {}
    for name, endpoint in endpoints.items():
        operation = _operation(name, endpoint, limits, named, problem)
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "nestrec", "version": "1"},
        "paths": paths,
        "components": {"schemas": dict(sorted(named.items())), "securitySchemes": _SCHEMES},
    }


def _operation(
    name: str, endpoint: EndpointSpec, limits: LimitsConfig, named: dict[str, Schema], problem: Schema
) -> dict[str, Any]:
    response: dict[str, Any] = {"description": endpoint.summary}
    if endpoint.status != 204:
        schema = {"type": "string"} if endpoint.response is None else json_schema(endpoint.response, limits, named)
        response["content"] = {endpoint.content_type: {"schema": schema}}
    operation: dict[str, Any] = {"operationId": name, "summary": endpoint.summary}
    if endpoint.audience != "anyone":
        operation["security"] = _SECURITY
    if parameters := re.findall(r"{(\w+)}", endpoint.path):
        operation["parameters"] = [
            {"name": parameter, "in": "path", "required": True, "schema": {"type": "string"}}
            for parameter in parameters
        ]
    if endpoint.request is not None:
        body: dict[str, Any] = {"schema": json_schema(endpoint.request, limits, named)}
        if endpoint.example:
            body["example"] = dict(endpoint.example)
        operation["requestBody"] = {"required": True, "content": {JSON_TYPE: body}}
    return {**operation, "responses": {str(endpoint.status): response, **_problems(endpoint, problem)}}


def _problems(endpoint: EndpointSpec, problem: Schema) -> dict[str, Any]:
    if endpoint.request is not None:
        statuses = tuple(_ERRORS)
    else:
        statuses = ("400",) if "{" in endpoint.path else ()
        statuses += _AUTH_ERRORS if endpoint.audience != "anyone" else ()
    return {status: _problem(status, problem) for status in statuses}


def _problem(status: str, schema: Schema) -> dict[str, Any]:
    response: dict[str, Any] = {"description": _ERRORS[status], "content": {JSON_TYPE: {"schema": schema}}}
    if status in _RETRYABLE:
        seconds = {"description": "Seconds after which to retry.", "schema": {"type": "integer", "minimum": 1}}
        response["headers"] = {"Retry-After": seconds}
    return response


_FILES = resources.files("nestrec.serving.http") / "static"


def _read(name: str) -> str:
    return (_FILES / name).read_text(encoding="utf-8")


def _csp_hash(content: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() + "'"


_STYLE, _SCRIPT = _read("live.css"), _read("live.js")
PAGE = _read("live.html").replace("/*STYLE*/", _STYLE).replace("/*SCRIPT*/", _SCRIPT).encode()
PAGE_POLICY: Header = (
    b"content-security-policy",
    f"default-src 'none'; style-src {_csp_hash(_STYLE)}; script-src {_csp_hash(_SCRIPT)}; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'".encode(),
)
