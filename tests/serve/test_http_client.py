"""HTTP client core on sockets: requests, responses, errors and reuse of connections."""

import asyncio
import contextlib
import ssl
import threading

import pytest
from certificates import make_certificate

from nestrec.serving.core.http_client import (
    NotHttpError,
    Pool,
    Request,
    Response,
    encode_request,
    parse_head,
    send_blocking,
    split_url,
)

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Name:  a value \r\n\r\nok"
LIMIT_S = 60.0


class Server:
    """Fake server that sends one prepared response per request, and closes a connection after its last response.

    Args:
        responses: Responses of each connection, in order; later connections get 200.
    """

    def __init__(self, *responses):
        self.responses = list(responses)
        self.heads = []
        self.writers = []
        self.num_connections = 0
        self.url = ""

    async def serve(self, reader, writer):
        self.num_connections += 1
        self.writers.append(writer)
        responses = self.responses.pop(0) if self.responses else [OK] * 99
        try:
            for response in responses:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
                self.heads.append((head, await reader.readexactly(size)))
                writer.write(response)
        except (OSError, EOFError):
            pass
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def serving(*responses, tls=None):
    server = Server(*responses)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls)
    server.url = f"http{'s' if tls else ''}://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listening.close()
        for writer in server.writers:
            writer.transport.abort()
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def open_pool(**options):
    pool = Pool(**options)
    try:
        yield pool
    finally:
        await pool.close()


async def send_by_pool(request):
    async with open_pool() as pool:
        return await pool.send(request, timeout_s=LIMIT_S)


@contextlib.contextmanager
def serving_from_thread(*responses):
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    context = serving(*responses)
    try:
        yield asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result()
    finally:
        asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_http_pool_equals_blocking_call():
    with serving_from_thread() as server:
        request = Request("POST", f"{server.url}/v1/rank?a=%20", {b"x-one": b"1"}, b"body")
        responses = [send_blocking(request, timeout_s=LIMIT_S), asyncio.run(send_by_pool(request))]
    assert responses == [Response(200, {b"content-length": b"2", b"x-name": b"a value"}, b"ok")] * 2
    for head, body in server.heads:
        assert head.startswith(b"POST /v1/rank?a=%20 HTTP/1.1\r\n")
        assert b"\r\nx-one: 1\r\n" in head.lower()
        assert b"\r\nhost: 127.0.0.1:" in head.lower()
        assert body == b"body"


def test_http_pool_reuses_connections_if_repeatable():
    async def run():
        closing = OK.replace(b"X-Name:  a value", b"Connection: close")
        async with serving([OK, OK], [OK, OK], [closing, OK]) as server:
            request = Request("GET", f"{server.url}/")
            found = []
            async with open_pool() as pool:
                for is_repeatable in (True, True, True, False, True, True):
                    response = await pool.send(request, timeout_s=LIMIT_S, is_repeatable=is_repeatable)
                    found.append((response.body, server.num_connections))
            return found

    # The third request finds its connection closed. The fourth one must not be repeated, so it opens a new connection,
    # which its response closes.
    assert asyncio.run(run()) == [(b"ok", number) for number in (1, 1, 2, 3, 3, 4)]


def test_http_pool_timeout_drops_connection():
    async def run():
        async with serving([OK, OK[:-1], OK]) as server:
            request = Request("GET", f"{server.url}/")
            async with open_pool() as pool:
                await pool.send(request, timeout_s=LIMIT_S)
                with pytest.raises(TimeoutError):
                    await pool.send(request, timeout_s=0.05)
                late = await pool.send(request, timeout_s=LIMIT_S)
            return late.body, server.num_connections

    assert asyncio.run(run()) == (b"ok", 2)


def test_http_pool_verifies_certificates(tmp_path):
    certificate, key = make_certificate(tmp_path, "server")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)

    async def run():
        async with serving(tls=tls) as server:
            request = Request("GET", f"{server.url}/")
            async with open_pool(tls=ssl.create_default_context(cafile=certificate)) as pool:
                body = (await pool.send(request, timeout_s=LIMIT_S)).body
            with pytest.raises(ssl.SSLCertVerificationError):
                await Pool().send(request, timeout_s=LIMIT_S)
            return body

    assert asyncio.run(run()) == b"ok"


@pytest.mark.parametrize(
    "send",
    [lambda r: asyncio.run(send_by_pool(r)), lambda r: send_blocking(r, timeout_s=LIMIT_S)],
    ids=["pool", "blocking"],
)
@pytest.mark.parametrize(
    ("response", "error"),
    [(b"", EOFError), (OK[:-1], EOFError), (b"SSH-2.0\r\n\r\n", NotHttpError), (b"\x15\x03\r\n\r\n", NotHttpError)],
)
def test_http_client_invalid_response_errors(send, response, error):
    with serving_from_thread([response]) as server, pytest.raises(error):
        send(Request("GET", f"{server.url}/"))


def test_http_blocking_call_does_not_follow_redirects():
    moved = b"HTTP/1.1 302 Found\r\nlocation: /other\r\ncontent-length: 0\r\n\r\n"
    with serving_from_thread([moved], [OK.replace(b"200 OK", b"503 Away")]) as server:
        request = Request("GET", f"{server.url}/")
        found = [send_blocking(request, timeout_s=LIMIT_S) for _ in range(2)]
    assert [(response.status, response.body) for response in found] == [(302, b""), (503, b"ok")]
    assert found[0].headers[b"location"] == b"/other"


def test_http_blocking_call_uses_proxy_only_on_request(monkeypatch):
    monkeypatch.delenv("no_proxy", raising=False)
    with serving_from_thread([OK], [OK]) as server:
        monkeypatch.setenv("http_proxy", server.url)
        send_blocking(Request("GET", "http://other.example/a"), timeout_s=LIMIT_S, uses_proxy=True)
        assert server.heads[0][0].startswith(b"GET http://other.example/a HTTP/1.1\r\n")
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
        assert send_blocking(Request("GET", f"{server.url}/b"), timeout_s=LIMIT_S).status == 200


def test_http_client_rejects_chunked_responses():
    with pytest.raises(ValueError, match="no content-length"):
        parse_head(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")


@pytest.mark.parametrize("value", [b"a\r\nhost: b", b"a\nb", b"a\rb"])
def test_http_request_headers_reject_line_breaks(value):
    request = Request("GET", "http://127.0.0.1/", {b"x-name": value})
    with pytest.raises(ValueError, match="line break"):
        encode_request(request, *split_url(request.url))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000/a?b=/c", ("127.0.0.1", 8000, False, b"127.0.0.1:8000", "/a?b=/c")),
        ("https://[::1]", ("::1", 443, True, b"[::1]", "/")),
        ("127.0.0.1:8000/a", None),
        ("ftp://host/a", None),
        ("http:///a", None),
        ("http://user@host/a", None),
        ("http://host:port/a", None),
        ("http://host?a", None),
    ],
)
def test_http_url_is_split_or_rejected(url, expected):
    if expected is None:
        with pytest.raises(ValueError):
            split_url(url)
    else:
        origin, target = split_url(url)
        assert (*origin, target) == expected
