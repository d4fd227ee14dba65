"""Client of the admin API of a server or gateway: swap, roll back, scale and status; and the `nestrec health` probe.

`nestrec health` is a liveness probe for containers, so that an image does not need another HTTP client.
"""

import json
import os
import ssl
from pathlib import Path
from typing import Any

from nestrec.base.errors import UserError
from nestrec.serving.core.http_client import NotHttpError, Request, Response, send_blocking


def connection_remedy(reason: object) -> str:
    """Return the remedy for a failed connection, depending on the error."""
    match reason:
        case ssl.SSLCertVerificationError():
            return "set SSL_CERT_FILE to the certificate of the issuing CA, and use a host name of the certificate"
        case ssl.SSLError():
            return "check that a nestrec server with TLS listens there; without TLS, use http://"
        case NotHttpError() | EOFError():  # a server with TLS closes the connection or sends an alert
            return "check that a nestrec server listens there; with TLS, use https://"
    return "check that a nestrec server listens there"


KEY_VARIABLE = "NESTREC_ADMIN_KEY"
_CHANGE_TIMEOUT_S, _READ_TIMEOUT_S = 3600.0, 60.0
"""Timeouts of requests that change the models or instances, and of requests that only read."""


def absolute_model_paths(models: list[str]) -> list[str]:
    """Return absolute paths of model folders on this machine; other paths and URLs are resolved by the server."""
    return [str(Path(model).absolute()) if Path(model.partition("@")[0]).exists() else model for model in models]


def call_admin_api(address: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Send a request to the admin API of a server or gateway.

    Args:
        address: URL of the server; `http://` is the default scheme.
        path: Path below `/v1/admin/`.
        body: Body of a POST request; None sends a GET request.

    Returns:
        The JSON body of the response.

    Raises:
        UserError: The server cannot be reached or rejects the request.
    """
    address = (address if "://" in address else f"http://{address}").rstrip("/")
    headers = {b"content-type": b"application/json", **_auth_headers()}
    url = f"{address}/v1/admin/{path}"
    request = Request("GET", url, headers) if body is None else Request("POST", url, headers, json.dumps(body).encode())
    try:
        response = send_blocking(
            request, timeout_s=_READ_TIMEOUT_S if body is None else _CHANGE_TIMEOUT_S, uses_proxy=True
        )
        if response.status < 300:
            return dict(json.loads(response.body))
    except (OSError, EOFError, ValueError) as error:
        remedy = connection_remedy(error)
        raise UserError(f"the request failed: {error}", option="server", value=address, remedy=remedy) from error
    if path == "scale" and response.status == _NOT_FOUND:
        remedy = "start a gateway with nestrec serve --model MODEL --num_instances N --load_balancer gateway"
        raise UserError(
            "the server is not a gateway, so it cannot start or stop instances",
            option="server",
            value=address,
            remedy=remedy,
        )
    message, remedy = _parse_error(response)
    raise UserError(message, option="server", value=address, remedy=remedy or _default_remedy(response))


def _auth_headers() -> dict[bytes, bytes]:
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not (key.isascii() and key.isprintable()):  # not shown, because part of the value may be a valid key
        remedy = "set it to a key as `nestrec create-key` printed it"
        raise UserError("invalid API key", option=KEY_VARIABLE, value=f"{len(key)} characters", remedy=remedy)
    return {b"authorization": f"Bearer {key}".encode()} if key else {}


def format_instances(response: dict[str, Any]) -> list[str]:
    """Return one line per instance with the models that it serves."""
    instances = response.get("instances", [response])
    return [f"instance {slot}: {_format_instance(instance)}" for slot, instance in enumerate(instances)]


def _format_instance(instance: dict[str, Any] | None) -> str:
    if instance is None:
        return "not responding"
    models = ", ".join(f"{role} {model['version']} ({model['folder']})" for role, model in instance["models"].items())
    return f"{models}{', draining' if instance['draining'] else ''}"


def _parse_error(response: Response) -> tuple[str, str]:
    """Return the error message of a response and its remedy, which can be empty."""
    try:
        error = json.loads(response.body)["error"]
        message = f"{error['field']}: {error['message']}" if "field" in error else error["message"]
        return f"the server rejected the request: {message}", error.get("remedy", "")
    except (ValueError, KeyError, TypeError):
        return f"the server rejected the request with status {response.status}", ""


def _default_remedy(response: Response) -> str:
    if response.status in (401, 403):
        return f"set {KEY_VARIABLE} to an API key with the role admin"
    if b"location" in response.headers:
        return f"use the address that the server redirects to: {response.headers[b'location'].decode('latin-1')}"
    return "see the log of the server; it still serves the previous models"


_TIMEOUT_S = 4.0
_OK, _NOT_FOUND = 200, 404


def check_health(address: str) -> None:
    """Send a liveness probe (`/health/live`) to a server on this machine, by HTTP and then by TLS.

    Raises:
        UserError: The server is not alive.
    """
    host, _, port = address.rpartition("://")[2].rstrip("/").rpartition(":")
    if not host or not port.isdigit():
        raise UserError("not an address", option="ADDRESS", value=address, remedy="write HOST:PORT, as 127.0.0.1:8001")
    reason = "no server responds at this address"
    # The certificate is not verified: it contains the public host name, and the probe connects to this machine.
    for scheme, tls in (("http", None), ("https", ssl._create_unverified_context())):
        try:
            status = send_blocking(
                Request("GET", f"{scheme}://{host}:{port}/health/live"), timeout_s=_TIMEOUT_S, tls=tls
            ).status
        except (OSError, EOFError):
            continue
        if status == _OK:
            return
        reason = f"it responds with status {status}"
    raise UserError(f"not alive: {reason}", option="ADDRESS", value=address, remedy="see the log of the server")
