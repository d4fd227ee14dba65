"""Measures the cost of API keys and TLS per request: python deploy/measure_safety.py --json docs/results/safety.json

One process runs a server per configuration, over real sockets. In each round every server gets the same number of
requests, and ratios are computed within a round. The rows `gate` measure the authorization alone, without a socket.
"""

import argparse
import asyncio
import json
import ssl
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from uvicorn.server import ServerState

from nestrec.models.hstu import HSTUConfig
from nestrec.report.result_file import write_frame
from nestrec.serving.core.request_limits import LimitsConfig
from nestrec.serving.http.http_app import App
from nestrec.serving.http.serve_config import ServeConfig, create_security, uvicorn_config
from nestrec.serving.security.auth import ApiKeyEntry, add_entry, digest_of, generate_key
from nestrec.serving.security.security_config import SecurityConfig
from nestrec.serving.service.inference_service import Service, ServiceConfig
from nestrec_bench.harness.random_model import random_retrieval

ROUNDS, ASKED = 30, 20
BODY = json.dumps({"user": "u", "history": {"items": ["1", "2"], "times_ms": [1, 2]}, "candidates": ["3"]}).encode()


def request(key: str) -> bytes:
    head = "POST /v1/rank HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"authorization: Bearer {key}\r\n" if key else ""
    return f"{head}content-length: {len(BODY)}\r\n\r\n".encode() + BODY


async def connected(app: App, security: SecurityConfig, trusted: Path | None) -> Any:
    """Start a server and return a connection to it."""
    cfg = ServeConfig(limits=LimitsConfig(default_timeout_ms=10_000), security=security)
    config = uvicorn_config(app, cfg, app, create_security(cfg))
    config.load()
    made: Any = config.http_protocol_class
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: made(config=config, server_state=state, app_state={}), "127.0.0.1", 0, ssl=config.ssl
    )
    context = None if trusted is None else ssl.create_default_context(cafile=trusted)
    return await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1], ssl=context)


async def spent_us(connection: Any, data: bytes) -> float:
    """Return the mean time of a response in microseconds."""
    reader, writer = connection
    start_s = time.perf_counter()
    for _ in range(ASKED):
        writer.write(data)
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in head.split(b"\r\n")[0], head
        await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
    return (time.perf_counter() - start_s) / ASKED * 1e6


def key_file(folder: Path, count: int) -> tuple[Path, str]:
    """Write a file of `count` keys, and return its path and the last key."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{count}.toml"
    key = ""
    for number in range(count):
        key = generate_key()
        add_entry(path, ApiKeyEntry(name=f"k{number}", sha256=digest_of(key.encode()).hex()))
    return path, key


def certificate(folder: Path) -> tuple[Path, Path]:
    paths = folder / "a.pem", folder / "a.key"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=a"
    more = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(paths[1]), "-out", str(paths[0])]
    subprocess.run([*command.split(), *more], check=True, capture_output=True)
    return paths


async def over_sockets(service: Service, folder: Path) -> list[dict[str, Any]]:
    app = App(service, LimitsConfig(default_timeout_ms=10_000))
    pem = certificate(folder)
    one, many = key_file(folder, 1), key_file(folder, 256)
    tls = {"tls_certificate": str(pem[0]), "tls_private_key": str(pem[1])}
    ways: dict[str, tuple[SecurityConfig, str]] = {
        "open": (SecurityConfig(), ""),
        "1 key": (SecurityConfig(api_keys=str(one[0])), one[1]),
        "256 keys": (SecurityConfig(api_keys=str(many[0])), many[1]),
        "TLS and 1 key": (SecurityConfig(api_keys=str(one[0]), **tls), one[1]),
    }
    connections = {
        name: await connected(app, security, pem[0] if security.tls_certificate else None)
        for name, (security, _) in ways.items()
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, (_, key) in ways.items():
            times[name].append(await spent_us(connections[name], request(key)))
    for _, writer in connections.values():
        writer.close()
    return [row("request", name, times[name][2:], times["open"][2:]) for name in ways]


def measure_authorizer(folder: Path) -> list[dict[str, Any]]:
    authorizers = {}
    for count in (0, 1, 16, 256):
        path, key = key_file(folder / "gate", count)
        authorizer = create_security(
            ServeConfig(security=SecurityConfig(api_keys=str(path) if count else ""))
        ).make_authorizer([])
        authorizers[f"{count} keys"] = (
            authorizer,
            [(b"host", b"localhost"), (b"authorization", f"Bearer {key}".encode())],
        )
    times: dict[str, list[float]] = {name: [] for name in authorizers}
    for _ in range(ROUNDS):
        for name, (authorizer, headers) in authorizers.items():
            start_s = time.perf_counter()
            for _ in range(200):
                decision = authorizer.authorize("/v1/rank", "/v1/rank", headers, "127.0.0.1")
            times[name].append((time.perf_counter() - start_s) / 200 * 1e6)
            assert decision.rejection is None
    return [row("gate", name, times[name], times["0 keys"]) for name in authorizers]


def row(what: str, way: str, times: list[float], of: list[float]) -> dict[str, Any]:
    ratios = sorted(a / b for a, b in zip(times, of, strict=True))
    low, high = ratios[len(ratios) // 10], ratios[-len(ratios) // 10]
    found = {"median_us": statistics.median(times), "ratio": statistics.median(ratios), "low": low, "high": high}
    return {"what": what, "way": way, "in_process": True, **{name: round(value, 3) for name, value in found.items()}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    encoder = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=16)
    service = Service({"retrieval": random_retrieval(encoder, num_items=50)}, ServiceConfig())
    with tempfile.TemporaryDirectory() as name:
        rows = asyncio.run(over_sockets(service, Path(name))) + measure_authorizer(Path(name))
    service.close()
    for one in rows:
        print(one)
    if chosen.json is not None:
        command = "python deploy/measure_safety.py --json docs/results/safety.json"
        write_frame(chosen.json, bench="safety", command=command, rows=rows)


if __name__ == "__main__":
    main()
