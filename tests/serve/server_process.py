"""A server in a process of its own, for tests that need real sockets and signals."""

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
from support.command_runner import piped


@contextlib.contextmanager
def running_server(folder, *options, **environment):
    """Yields (port, process); the process, forked from one that has loaded torch, is ended afterwards."""
    port = free_port()
    with started(piped, folder, "--port", str(port), *options, **environment) as process:
        wait_until_ready(port, process)
        yield port, process


def starting_server(folder, *options, **environment):
    """A process that is not ready yet and loads all that it needs."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return started(functools.partial(subprocess.Popen, **pipes), folder, *options, **environment)


@contextlib.contextmanager
def started(start, folder, *options, **environment):
    """Yields a process, with all that it writes on `stdout`; it is ended afterwards."""
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
            time.sleep(0.05)  # another process starts: there is no clock to inject
    raise AssertionError("the server did not start")


def exchange(port, data, timeout_s=60.0):
    """Send bytes and read to the end."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as connection:
        connection.sendall(data)
        return read_to_end(connection)


def provoke(port, data, patience_s=0.02):
    """Send bytes that may not be a whole request, wait a little for an answer, end our side, and read the rest."""
    with socket.create_connection(("127.0.0.1", port), timeout=10.0) as connection:
        with contextlib.suppress(OSError):  # the server may have closed already; what it said can still be read
            connection.sendall(data)
        select.select([connection], [], [], patience_s)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        return read_to_end(connection, num_chances=6)


def provoke_patiently(port, data, num_chances=6):
    """The same, again where the server asks for it: a deadline that passes on a paused machine is nobody's fault, and
    bytes that the server cannot bear get the same answer each time."""
    for _ in range(num_chances):
        response = provoke(port, data)
        if status_of(response) != 503 or b"\r\nretry-after: " not in response:
            break
    return response


def read_to_end(connection, num_chances=1):
    """num_chances: a machine that is paused uses them up without a fault of the server."""
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
    """The status of the answer, on a connection of its own; `sent`, a semaphore, is released when all bytes are out."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    await writer.drain()
    sent.release()
    response = await reader.read()
    writer.close()
    return status_of(response)


def post(path, body):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\nconnection: close\r\n\r\n".encode() + content
