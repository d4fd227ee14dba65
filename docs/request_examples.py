"""Examples of every request, in curl and in Python, from the OpenAPI document of the server."""

import json
import textwrap
from collections.abc import Iterator
from typing import Any

URL = "http://127.0.0.1:8000"
_NEW_USER = {"id": "ann"}


def examples(described: dict[str, Any], methods: set[str]) -> Iterator[tuple[str, str, str, str]]:
    """(title, summary, curl, Python) of each operation; Python is empty where the client has no such method.

    described: the OpenAPI document. methods: of the client, named as operations are.
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


def examples_page(described: dict[str, Any], methods: set[str]) -> str:
    """A page of the site."""
    parts = [
        "# Requests",
        "Every route of `nestrec serve`, from its OpenAPI document (`/openapi.json`; `/docs` on a server describes "
        "each field). Python needs `pip install 'nestrec[client]'`; [clients](../clients.md) tells more of it.",
    ]
    for title, summary, curl, called in examples(described, methods):
        parts += [f"## {title}", f"{summary}.", f"```sh\n{curl}\n```"]
        if called:
            parts.append(f"```python\n{called}\n```")
    return "\n\n".join(parts)


def _curl(method: str, path: str, body: Any) -> str:
    if body is None:
        return f"curl {'' if method == 'get' else f'-X {method.upper()} '}{URL}{path}"
    return f"curl -H 'content-type: application/json' {URL}{path} \\\n  -d '{json.dumps(body)}'"


def _python(name: str, arguments: dict[str, Any]) -> str:
    columns = arguments.get("history", {})  # the client takes them as arguments of their own
    plain = {argument: value for argument, value in arguments.items() if argument != "history"}
    given = ", ".join(f"{argument}={value!r}" for argument, value in {**plain, **columns}.items())
    called = f"answer = client.{name}({given})"
    wrapped = textwrap.wrap(
        called, 100, initial_indent="    ", subsequent_indent="        ", break_long_words=False, break_on_hyphens=False
    )
    head = f'from nestrec.client import Client\n\nwith Client("{URL}") as client:'
    return "\n".join([head, *wrapped])
