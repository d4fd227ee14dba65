"""Requests from the gateway to one instance, with its secret, the client's address, and the request id."""

from nestrec.serving.core import tracing
from nestrec.serving.core.asgi import CLIENT_HEADER, REQUEST_ID_HEADER
from nestrec.serving.core.http_client import Pool, Request, Response
from nestrec.serving.core.request_limits import current_request_id
from nestrec.serving.security import security_config

_LONGEST_S = 30.0


class Upstream:
    """Connection pool to one instance. Use it from one event loop."""

    def __init__(self, port: int):
        self.port = port
        self._pool = Pool()

    async def send(
        self,
        method: str,
        target: bytes,
        body: bytes = b"",
        *,
        client: str = "",
        is_repeatable: bool = True,
        timeout_s: float = _LONGEST_S,
    ) -> Response:
        """Send a request to the instance; raises what `Pool.send` raises.

        Args:
            method: HTTP method.
            target: Path and query.
            body: JSON.
            client: Address of the client on whose behalf the request is sent.
            is_repeatable: Whether the instance may receive the request twice.
            timeout_s: Longest time until the whole response has arrived.
        """
        with tracing.client_span(self.port) as trace:
            headers = {
                b"content-type": b"application/json",
                security_config.GATEWAY_SECRET_HEADER: security_config.gateway_secret().encode(),
            }
            if trace:
                headers[tracing.HEADER] = trace
            if client:
                headers[CLIENT_HEADER] = client.encode("latin-1")
            if request_id := current_request_id.get():
                headers[REQUEST_ID_HEADER] = request_id.encode()
            path = target.decode("latin-1").removeprefix("/")  # `OPTIONS *` has no slash; it is sent as /*
            url = f"http://127.0.0.1:{self.port}/{path}"
            request = Request(method, url, headers, body)
            return await self._pool.send(request, timeout_s=timeout_s, is_repeatable=is_repeatable)

    def drop(self) -> None:
        """Close the idle connections to an instance that is gone."""
        self._pool.drop_idle()

    async def close(self) -> None:
        """Close the idle connections and wait until they are closed."""
        await self._pool.close()
