"""`nestrec health`: what a container's health check asks of a server, without a tool of its own in the image."""

import http.client
import ssl

from nestrec.base.errors import UserError

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
