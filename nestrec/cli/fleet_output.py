"""Calls the admin API of a server or a gateway, and formats what it returns.

What whoever runs servers asks of them: other models, the ones before, fewer or more instances.

`nestrec health`: what a container's health check asks of a server, without a tool of its own in the image.
"""

import json
import os
import ssl
from pathlib import Path
from typing import Any

from nestrec.base.errors import UserError
from nestrec.serving.core.http_client import NotHttpError, Request, Response, send_blocking


def remedy_without_answer(reason: object) -> str:
    """Return what to do about a server that does not answer, by the error that was raised."""
    match reason:
        case ssl.SSLCertVerificationError():
            return "set SSL_CERT_FILE to the certificate of whoever has signed the server's, and ask by a name in that"
        case ssl.SSLError():
            return "see that a nestrec server with TLS listens there; one without is asked by http://"
        case NotHttpError() | EOFError():  # a server with TLS closes the connection, or answers by an alert
            return "see that a nestrec server listens there; one with TLS is asked by https://"
    return "see that a nestrec server listens there"


KEY_VARIABLE = "NESTREC_ADMIN_KEY"
_LOAD_S, _TOLD_S = 3600.0, 60.0
"""that a change may take, and what is only told"""


def as_seen_by_server(models: list[str]) -> list[str]:
    """Whole paths of folders of this machine; others are the server's own, as are addresses of other kinds."""
    return [str(Path(model).absolute()) if Path(model.partition("@")[0]).exists() else model for model in models]


def operate(address: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """What a server or a front answers to POST, or to GET where there is no body; `UserError` where it refuses."""
    address = (address if "://" in address else f"http://{address}").rstrip("/")
    headers = {b"content-type": b"application/json", **_authorized()}
    url = f"{address}/v1/admin/{path}"
    request = Request("GET", url, headers) if body is None else Request("POST", url, headers, json.dumps(body).encode())
    try:
        response = send_blocking(request, timeout_s=_TOLD_S if body is None else _LOAD_S, uses_proxy=True)
        if response.status < 300:
            return dict(json.loads(response.body))
    except (OSError, EOFError, ValueError) as error:
        remedy = remedy_without_answer(error)
        raise UserError(f"does not answer: {error}", option="server", value=address, remedy=remedy) from error
    message, remedy = _refusal(response)
    raise UserError(message, option="server", value=address, remedy=remedy or _remedy(response))


def _authorized() -> dict[bytes, bytes]:
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not (key.isascii() and key.isprintable()):  # it is not shown: it may be a key with something behind it
        remedy = "put the key into it, as `nestrec key` has printed it"
        raise UserError("is no key", option=KEY_VARIABLE, value=f"{len(key)} characters", remedy=remedy)
    return {b"authorization": f"Bearer {key}".encode()} if key else {}


def served(answer: dict[str, Any]) -> list[str]:
    """A line for each instance: what it serves now."""
    instances = answer.get("instances", [answer])
    return [f"instance {slot}: {_models(instance)}" for slot, instance in enumerate(instances)]


def _models(instance: dict[str, Any] | None) -> str:
    if instance is None:
        return "does not answer"
    told = ", ".join(f"{role} {model['version']} ({model['folder']})" for role, model in instance["models"].items())
    return f"{told}{', set aside' if instance['draining'] else ''}"


def _refusal(response: Response) -> tuple[str, str]:
    """Return why the server refuses and its remedy, which may be empty."""
    try:
        told = json.loads(response.body)["error"]
        message = f"{told['field']}: {told['message']}" if "field" in told else told["message"]
        return f"refuses: {message}", told.get("remedy", "")
    except (ValueError, KeyError, TypeError):
        return f"refuses with status {response.status}", ""


def _remedy(response: Response) -> str:
    if response.status in (401, 403):
        return f"put a key of its administrators into {KEY_VARIABLE}"
    if b"location" in response.headers:
        return (
            f"send the command to the address that it redirects to, {response.headers[b'location'].decode('latin-1')}"
        )
    return "see its log; what it served before is served on"


_TIMEOUT_S = 4.0
_OK = 200


def check_health(address: str) -> None:
    """`UserError` where nobody says at /health/live that the process is worth keeping. Plain HTTP, or else TLS."""
    host, _, port = address.rpartition("://")[2].rstrip("/").rpartition(":")
    if not host or not port.isdigit():
        raise UserError("is no address", option="ADDRESS", value=address, remedy="write HOST:PORT, as 127.0.0.1:8001")
    told = "nobody answers there"
    # The certificate names the server as clients know it, and this asks the machine that it runs on.
    for scheme, tls in (("http", None), ("https", ssl._create_unverified_context())):
        try:
            status = send_blocking(
                Request("GET", f"{scheme}://{host}:{port}/health/live"), timeout_s=_TIMEOUT_S, tls=tls
            ).status
        except (OSError, EOFError):
            continue
        if status == _OK:
            return
        told = f"it answers with status {status}"
    raise UserError(f"is not alive: {told}", option="ADDRESS", value=address, remedy="look at the server's log")
