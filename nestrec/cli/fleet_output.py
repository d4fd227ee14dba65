"""What whoever runs servers asks of them: other models, the ones before, fewer or more instances.

`nestrec health`: what a container's health check asks of a server, without a tool of its own in the image.
"""

import http.client
import json
import os
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from nestrec.base.errors import UserError


def remedy_without_answer(reason: object) -> str:
    """Return what to do about a server that does not answer, by the error that was raised."""
    match reason:
        case ssl.SSLCertVerificationError():
            return "set SSL_CERT_FILE to the certificate of whoever has signed the server's, and ask by a name in that"
        case ssl.SSLError():
            return "see that a nestrec server with TLS listens there; one without is asked by http://"
        case http.client.HTTPException():  # also if the connection was closed without an answer
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
    headers = {"content-type": "application/json", **_authorized()}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{address}/v1/admin/{path}", data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_TOLD_S if body is None else _LOAD_S) as response:
            return dict(json.load(response))
    except urllib.error.HTTPError as error:
        message, remedy = _refusal(error)
        raise UserError(message, field="server", value=address, remedy=remedy or _remedy(error.code)) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        remedy = remedy_without_answer(reason)
        raise UserError(f"does not answer: {reason}", field="server", value=address, remedy=remedy) from error


def _authorized() -> dict[str, str]:
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not (key.isascii() and key.isprintable()):  # it is not shown: it may be a key with something behind it
        remedy = "put the key into it, as `nestrec key` has printed it"
        raise UserError("is no key", field=KEY_VARIABLE, value=f"{len(key)} characters", remedy=remedy)
    return {"authorization": f"Bearer {key}"} if key else {}


def served(answer: dict[str, Any]) -> list[str]:
    """A line for each instance: what it serves now."""
    instances = answer.get("instances", [answer])
    return [f"instance {slot}: {_models(instance)}" for slot, instance in enumerate(instances)]


def _models(instance: dict[str, Any] | None) -> str:
    if instance is None:
        return "does not answer"
    told = ", ".join(f"{role} {model['version']} ({model['folder']})" for role, model in instance["models"].items())
    return f"{told}{', set aside' if instance['draining'] else ''}"


def _refusal(error: urllib.error.HTTPError) -> tuple[str, str]:
    """Return why the server refuses and its remedy, which may be empty."""
    try:
        told = json.load(error)["error"]
        message = f"{told['field']}: {told['message']}" if "field" in told else told["message"]
        return f"refuses: {message}", told.get("remedy", "")
    except (ValueError, KeyError, TypeError):
        return f"refuses with status {error.code}", ""


def _remedy(status: int) -> str:
    if status in (401, 403):
        return f"put a key of its administrators into {KEY_VARIABLE}"
    return "see its log; what it served before is served on"


_TIMEOUT_S = 4.0


def check_health(address: str) -> None:
    """`UserError` where nobody says at /health/live that the process is worth keeping. Plain HTTP, or else TLS."""
    host, _, port = address.rpartition("://")[2].rstrip("/").rpartition(":")
    if not host or not port.isdigit():
        raise UserError("is no address", field="ADDRESS", value=address, remedy="write HOST:PORT, as 127.0.0.1:8001")
    told = "nobody answers there"
    # The certificate names the server as clients know it, and this asks the machine that it runs on.
    for context in (None, ssl._create_unverified_context()):
        connection = (
            http.client.HTTPConnection(host, int(port), timeout=_TIMEOUT_S)
            if context is None
            else http.client.HTTPSConnection(host, int(port), timeout=_TIMEOUT_S, context=context)
        )
        try:
            connection.request("GET", "/health/live")
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException):
            continue
        finally:
            connection.close()
        if status == http.client.OK:
            return
        told = f"it answers with status {status}"
    raise UserError(f"is not alive: {told}", field="ADDRESS", value=address, remedy="look at the server's log")
