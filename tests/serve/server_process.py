"""A server in a separate process, for tests that need real sockets and signals."""

import asyncio
import contextlib
import functools
import json
import os
import select
import socket
import subprocess
import sys
import time

from nestrec.serving.fleet.readiness_probes import free_port
from support.command_runner import start_piped


@contextlib.contextmanager
def running_server(folder, *options, **environment):
    """Start a server and yield (port, process) when it is ready; the process is killed afterwards.

    The process is forked from one that has imported torch, which saves the time of the import.

    Args:
        folder: Model of the server.
        options: More options of `nestrec serve`.
        environment: More environment variables.
    """
    port = free_port()
    with started(start_piped, folder, "--port", str(port), *options, **environment) as process:
        wait_until_ready(port, process)
        yield port, process


def starting_server(folder, *options, **environment):
    """Start a server in a fresh interpreter, without waiting until it is ready."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return started(functools.partial(subprocess.Popen, **pipes), folder, *options, **environment)


@contextlib.contextmanager
def started(start, folder, *options, **environment):
    """Start a server and yield its process, whose `stdout` has all output; the process is killed afterwards."""
    command = [sys.executable, "-m", "nestrec", "serve", "--model", str(folder), *options]
    process = start(command, env={**os.environ, "OMP_NUM_THREADS": "1", **environment})
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def wait_until_ready(port, process, timeout_s=280.0):
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        assert process.poll() is None, process.stdout.read().decode()
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1.0):
                return
        except OSError:
            time.sleep(0.05)  # the server is another process: there is no clock to inject
    raise AssertionError("the server did not start")


def exchange(port, data, timeout_s=60.0):
    """Send bytes on a new connection and return all bytes of the response."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as connection:
        connection.sendall(data)
        return read_to_end(connection)


def provoke(port, data, patience_s=0.02):
    """Send bytes that may not be a complete request, and return the response.

    Args:
        port: Port of the server.
        data: Bytes to send.
        patience_s: Seconds to wait for a response before the client's side of the connection is shut down.
    """
    with socket.create_connection(("127.0.0.1", port), timeout=10.0) as connection:
        with contextlib.suppress(OSError):  # if the server has already closed, its response can still be read
            connection.sendall(data)
        select.select([connection], [], [], patience_s)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        return read_to_end(connection, num_chances=6)


def provoke_with_retries(port, data, num_chances=6):
    """Call `provoke`, and retry while the server responds with 503 and Retry-After.

    On a paused machine a deadline may pass, which is not a fault of the server. Bytes that the server fails to handle
    get the same response each time.
    """
    for _ in range(num_chances):
        response = provoke(port, data)
        if status_of(response) != 503 or b"\r\nretry-after: " not in response:
            break
    return response


def read_to_end(connection, num_chances=1):
    """Return all bytes until the connection ends.

    Args:
        connection: Socket with a timeout.
        num_chances: Number of timeouts after which the test fails. A paused machine causes timeouts, which are not a
            fault of the server.
    """
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while True:
            try:
                chunk = connection.recv(65536)
            except TimeoutError:
                num_chances -= 1
                if num_chances == 0:
                    raise
                continue
            if not chunk:
                break
            received += chunk
    return received


def status_of(response):
    return int(response.split(b" ", 2)[1]) if response.startswith(b"HTTP/1.") else None


async def status_once_sent(port, data, sent):
    """Send bytes on a new connection and return the status of the response.

    Args:
        port: Port of the server.
        data: Bytes to send.
        sent: Semaphore that is released as soon as all bytes are sent.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    await writer.drain()
    sent.release()
    response = await reader.read()
    writer.close()
    return status_of(response)


def post(path, body):
    """Return the bytes of a POST request; a body that is not bytes is encoded as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\nconnection: close\r\n\r\n".encode() + content
