"""Implementation of `nestrec load-test`: open-loop load of synthetic or recorded requests for a running server."""

import asyncio
import http.client
import json
import math
import os
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import SplitResult, urlsplit

import numpy as np

from nestrec.base.config import config
from nestrec.base.config_values import Count, Fraction, Natural, NonNegative, Positive
from nestrec.base.errors import UserError
from nestrec.cli.fleet_output import connection_remedy
from nestrec_bench.load_test.open_loop import (
    HttpClient,
    Trial,
    largest,
    poisson_arrivals,
    run_open_loop,
    run_punctually,
)

API_KEY_VARIABLE = "NESTREC_KEY"


@config
class LoadTestConfig:
    """Options of a load test."""

    requests_per_s: Positive = 20.0
    """Rate of synthetic requests per second, or the rate at which the search starts."""
    duration_s: Positive = 10.0
    """Duration of a trial, in seconds."""
    slo_ms: Positive = 100.0
    """Service-level objective (SLO) for the 99th percentile of the latency, in milliseconds."""
    search_for: Literal["", "rate", "history"] = ""
    """Quantity whose maximum under the SLO is searched for; by default, one trial is measured."""
    recording: str = ""
    """File of JSON lines {"at_s", "path", "body"}: recorded requests, which are sent instead of synthetic ones."""
    history_events: Natural = 100
    """Number of events in the history of each synthetic request."""
    num_candidates: Count = 64
    """Number of candidates of a ranking request."""
    items: str = ""
    """Items of synthetic requests: a file with one item id per line, or a number N for the ids "1" to "N"; if empty,
    at most 1,000 ids that the server's model knows."""
    num_users: Count = 1_000_000
    """Number of users from which new users are drawn."""
    returning_fraction: Fraction = 0.0
    """Fraction of requests of users with an earlier request in the same trial."""
    preinfer_lead_ms: NonNegative = 0.0
    """Time between a pre-infer signal and its ranking request, in milliseconds; 0 disables signals."""
    seed: int = 0
    """Random seed of arrivals, users and items."""


@dataclass(frozen=True, slots=True)
class RequestSchedule:
    """Requests with their intended send times."""

    at_s: list[float]
    paths: list[str]
    bodies: list[bytes]
    signals: list[bytes]
    """Pre-infer signals of the requests; empty if signals are disabled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequiredInputs:
    """Inputs that a model requires in addition to items and times."""

    actions: tuple[str, ...] = ()
    """Names of actions."""
    features: tuple[str, ...] = ()
    """Names of the features of events and candidates."""
    user_features: tuple[str, ...] = ()
    """Names of the features of users."""


def fetch_required_inputs(url: str) -> RequiredInputs:
    """Return the inputs of the ranking model on a server."""
    try:
        return required_inputs_of(_get_json(url, "/v1/models")["models"])
    except (ValueError, KeyError, TypeError) as error:
        problem = "the server does not describe the inputs of its models"
        remedy = "use a `nestrec serve` server of this version, or send recorded requests (--recording)"
        raise UserError(problem, option="URL", value=url, remedy=remedy) from error


def items_of(url: str) -> list[str]:
    """Return a sample of the item ids that the model on a server knows."""
    try:
        return [str(item) for item in _get_json(url, "/v1/items/sample")["items"]]
    except (ValueError, KeyError, TypeError) as error:
        problem = "the server does not list item ids"
        remedy = "name a file of item ids (--items), or send recorded requests (--recording)"
        raise UserError(problem, option="URL", value=url, remedy=remedy) from error


def request_items(url: str, items: str) -> Sequence[str | int]:
    """Return the items of synthetic requests.

    Args:
        url: Address of the server.
        items: Value of `LoadTestConfig.items`.
    """
    remedy = "name a file with one item id per line, set a number of at least 1, or leave it empty to ask the server"
    if not items:
        found = items_of(url)
    elif items.isdigit() and int(items) > 0:
        return range(1, int(items) + 1)
    else:
        try:
            found = [line.strip() for line in Path(items).read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, ValueError) as error:
            problem = f"the file cannot be read: {error}"
            raise UserError(problem, option="items", value=items, remedy=remedy) from error
    if not found:
        raise UserError("item ids are missing", option="items", value=items or url, remedy=remedy)
    return found


def _get_json(url: str, path: str) -> Any:
    """Return the JSON response of a server to GET; raise a ValueError if it is not JSON."""
    parts = urlsplit(url)
    connection = _connection(parts, 30.0)
    try:
        key = key_in_environment()
        connection.request("GET", path, headers={"authorization": f"Bearer {key}"} if key else {})
        response = connection.getresponse()
        if response.status in (401, 403):
            remedy = f"set the environment variable {API_KEY_VARIABLE} to an API key of the server (role public)"
            raise UserError("the server requires an API key", option="URL", value=url, remedy=remedy)
        return json.loads(response.read())
    except (OSError, http.client.HTTPException) as error:
        problem = f"the server does not respond: {error}"
        raise UserError(problem, option="URL", value=url, remedy=connection_remedy(error)) from error
    finally:
        connection.close()


def _connection(parts: SplitResult, timeout_s: float) -> http.client.HTTPConnection:
    """Return a connection to a server, which verifies the certificate if the server uses TLS."""
    host = parts.hostname or "127.0.0.1"
    if parts.scheme == "https":
        return http.client.HTTPSConnection(host, parts.port, timeout=timeout_s, context=ssl.create_default_context())
    return http.client.HTTPConnection(host, parts.port, timeout=timeout_s)


def key_in_environment() -> str:
    """Return the API key. It is not an option, because options are visible in the list of processes."""
    return os.environ.get(API_KEY_VARIABLE, "")


def required_inputs_of(models: Mapping[str, Any]) -> RequiredInputs:
    """Return the inputs of the ranking model from a server's description of its models."""
    model = models.get("ranking") or models["retrieval"]
    return RequiredInputs(**{name: tuple(model[name]) for name in ("actions", "features", "user_features")})


def run_load_test(
    url: str, cfg: LoadTestConfig, announce: Callable[[str], None] = lambda _: None
) -> list[dict[str, Any]]:
    """Run a load test: one trial, or the trials of a search.

    Args:
        url: Address of the server.
        cfg: Options of the load test.
        announce: Function that is called with a line about the requests that are sent.

    Returns:
        One row per trial; a search appends a row with the result.
    """
    check_server(url)
    reads = RequiredInputs() if cfg.recording else fetch_required_inputs(url)
    items = [] if cfg.recording else request_items(url, cfg.items)
    announce(_describe_requests(cfg, items))
    trials: list[dict[str, Any]] = []

    def measure(value: float) -> Trial:
        rate = value if cfg.search_for == "rate" else cfg.requests_per_s
        length = round(value) if cfg.search_for == "history" else cfg.history_events
        load = make_load(cfg, rate, length, reads, items)
        trial = run_punctually(send_load(url, load, cfg.preinfer_lead_ms / 1e3))
        trials.append(row_of(trial, cfg, length))
        return trial

    if cfg.search_for == "":
        measure(cfg.requests_per_s)
    else:
        start = cfg.requests_per_s if cfg.search_for == "rate" else float(cfg.history_events)
        best, _ = largest(measure, cfg.slo_ms, start=start)
        trials.append({**trials[-1], "largest": cfg.search_for, "value": best})
    return trials


def _describe_requests(cfg: LoadTestConfig, items: Sequence[str | int]) -> str:
    if cfg.recording:
        return f"sending the recorded requests of {cfg.recording}"
    source = "that the server lists" if not cfg.items else f"of --items {cfg.items}"
    return (
        f"sending synthetic requests: random histories and candidates of {len(items):,} items {source}; "
        "to send real requests, set --recording FILE"
    )


def check_server(url: str) -> None:
    """Raise a UserError if the server is not running; otherwise, all requests would count as rejected."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        remedy = "write http://HOST:PORT or https://HOST:PORT"
        raise UserError("must be the address of a server", option="URL", value=url, remedy=remedy)
    connection = _connection(parts, 5.0)
    try:
        connection.connect()
    except OSError as error:
        remedy = "start one with `nestrec serve`, or check host and port"
        if isinstance(error, ssl.SSLError):
            remedy = connection_remedy(error)
        raise UserError(f"cannot connect: {error}", option="URL", value=url, remedy=remedy) from error
    finally:
        connection.close()


def make_load(
    cfg: LoadTestConfig, rate: float, length: int, reads: RequiredInputs, items: Sequence[str | int] = ()
) -> RequestSchedule:
    """Return the requests of a trial.

    Args:
        cfg: Options of the load test.
        rate: Rate of synthetic requests per second.
        length: Number of events in the history of synthetic requests.
        reads: Inputs that the model requires.
        items: Items of synthetic requests.
    """
    if cfg.recording:
        return recorded_load(Path(cfg.recording))
    rng = np.random.default_rng(cfg.seed)
    at_s = poisson_arrivals(rate, cfg.duration_s, cfg.seed)
    users: list[int] = []
    bodies, signals = [], []
    for _ in at_s:
        is_returning = bool(users) and rng.random() < cfg.returning_fraction
        user = users[rng.integers(len(users))] if is_returning else int(rng.integers(cfg.num_users))
        users.append(user)
        signal, body = synthetic_request(user, length, cfg, rng, reads, items=items)
        signals.append(json.dumps(signal).encode())
        bodies.append(json.dumps(body).encode())
    return RequestSchedule(at_s.tolist(), ["/v1/rank"] * len(bodies), bodies, signals if cfg.preinfer_lead_ms else [])


def synthetic_request(
    user: int,
    length: int,
    cfg: LoadTestConfig,
    rng: np.random.Generator,
    reads: RequiredInputs,
    *,
    items: Sequence[str | int],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a pre-infer signal and a ranking request. The history of a user is a function of the user."""
    own = np.random.default_rng((cfg.seed, user))
    times = (np.arange(length) * 60_000 + 1_600_000_000_000).tolist()
    history: dict[str, Any] = {"items": _random_items(items, own, length), "times_ms": times}
    if reads.actions:
        history["actions"] = own.choice(reads.actions, length).tolist()
    if reads.features:
        history["features"] = {name: [None] * length for name in reads.features}
    common: dict[str, Any] = {"user": str(user), "history": history, "now_ms": 1_700_000_000_000}
    if reads.user_features:
        common["user_features"] = dict.fromkeys(reads.user_features)
    context = {"context": dict.fromkeys(reads.features)} if reads.features else {}
    candidates = _random_items(items, rng, cfg.num_candidates)
    timeout = {"timeout_ms": 10_000}
    signal = {**common, **timeout, "num_candidates": cfg.num_candidates}
    return signal, {**common, **context, **timeout, "candidates": candidates}


def _random_items(items: Sequence[str | int], rng: np.random.Generator, count: int) -> list[str | int]:
    return [items[index] for index in rng.integers(len(items), size=count).tolist()]


def recorded_load(path: Path) -> RequestSchedule:
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        at_s = [float(line["at_s"]) for line in lines]
        bodies = [json.dumps(line["body"]).encode() for line in lines]
        return RequestSchedule(at_s, [str(line["path"]) for line in lines], bodies, [])
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = "the file does not contain recorded requests"
        remedy = 'write JSON lines with "at_s", "path" and "body"'
        raise UserError(problem, option="recording", value=str(path), remedy=remedy) from error


async def send_load(url: str, load: RequestSchedule, signal_s: float) -> Trial:
    """Send requests and wait for their responses.

    Args:
        url: Address of the server.
        load: The requests.
        signal_s: Time between a pre-infer signal and its request, if there are signals.
    """
    parts = urlsplit(url)
    context = ssl.create_default_context() if parts.scheme == "https" else None
    port = parts.port or (http.client.HTTP_PORT if context is None else http.client.HTTPS_PORT)
    client = HttpClient(parts.hostname or "127.0.0.1", port, key=key_in_environment(), context=context)

    async def send(number: int) -> bool:
        if load.signals:
            asyncio.get_running_loop().create_task(client.post("/v1/preinfer", load.signals[number]))
            await asyncio.sleep(signal_s)
        status = (await client.post(load.paths[number], load.bodies[number])).status
        return 200 <= status < 300

    trial = await run_open_loop(load.at_s, send, lead_s=signal_s if load.signals else 0.0)
    await client.close()
    return trial


def row_of(trial: Trial, cfg: LoadTestConfig, length: int) -> dict[str, Any]:
    percentiles = {f"p{q}_ms": _rounded(trial.percentile_ms(q)) for q in (50, 90, 99)}
    return {
        "rate": round(trial.rate, 2),
        "requests": len(trial.latency_ms),
        "refused": trial.num_rejected,
        **({} if cfg.recording else {"history": length, "candidates": cfg.num_candidates}),
        **percentiles,
        "slo_ms": cfg.slo_ms,
        "meets": trial.meets(cfg.slo_ms),
        "goodput": round(trial.goodput(cfg.slo_ms), 2),
        "generator_late_p99_ms": _rounded(trial.lateness_ms),
    }


def _rounded(value: float) -> float | None:
    """Return a rounded value, or None instead of infinity, which JSON does not support: the request failed."""
    return round(value, 3) if math.isfinite(value) else None
