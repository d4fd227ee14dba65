"""`nestrec replay`: open-loop load on a running server, made up or recorded."""

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
from nestrec.base.config_values import Count, Natural, NonNegative, Positive, Share
from nestrec.base.errors import UserError
from nestrec.cli.fleet_output import remedy_without_answer
from nestrec_bench.load_test.open_loop import (
    HttpClient,
    Trial,
    largest,
    poisson_arrivals,
    run_open_loop,
    run_punctually,
)

KEY_VARIABLE = "NESTREC_KEY"


@config
class LoadTestConfig:
    rate: Positive = 20.0
    """requests a second (made-up load), or where the search starts"""
    duration_s: Positive = 10.0
    """how long requests are sent in one trial"""
    slo_ms: Positive = 100.0
    """what the 99th percentile must meet"""
    finds: Literal["", "rate", "history"] = ""
    """search for the largest that meets the SLO"""
    recorded: str = ""
    """file of JSON lines {"at_s", "path", "body"}: recorded requests, which are sent instead of synthetic ones"""
    history: Natural = 100
    """events of each user's history in made-up requests"""
    candidates: Count = 64
    """items of a ranking request"""
    items: str = ""
    """items of synthetic requests: a file with one item id per line, or a number N for the ids "1" to "N"; if empty,
    at most 1,000 ids that the server's model knows"""
    users: Count = 1_000_000
    """users that do not return are drawn from so many"""
    returning: Share = 0.0
    """share of requests of a user who was here before in the trial"""
    signal_ms: NonNegative = 0.0
    """a pre-infer signal goes out so long before each request; 0 sends none"""
    seed: int = 0
    """of arrivals, users and items"""


@dataclass(frozen=True, slots=True)
class RequestSchedule:
    """Requests with their intended moments."""

    at_s: list[float]
    paths: list[str]
    bodies: list[bytes]
    signals: list[bytes]
    """pre-infer signals, or none of them"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequiredInputs:
    """What a model must be told beside items and times."""

    actions: tuple[str, ...] = ()
    """names to choose from"""
    features: tuple[str, ...] = ()
    """categories of events and candidates"""
    user_features: tuple[str, ...] = ()
    """categories of users"""


def reads_of(url: str) -> RequiredInputs:
    """What the model that ranks on a server reads."""
    try:
        return reads_from(_asked(url, "/v1/models")["models"])
    except (ValueError, KeyError, TypeError) as error:
        remedy = "name a server of `nestrec serve` of this version, or record a load and give it by --recorded"
        raise UserError("does not describe what its models read", option="URL", value=url, remedy=remedy) from error


def items_of(url: str) -> list[str]:
    """Return some ids of items that the model on a server knows."""
    try:
        return [str(item) for item in _asked(url, "/v1/items/sample")["items"]]
    except (ValueError, KeyError, TypeError) as error:
        remedy = "give a file of item ids by --items, or recorded requests by --recorded"
        raise UserError("does not list the items that it knows", option="URL", value=url, remedy=remedy) from error


def chosen_items(url: str, items: str) -> Sequence[str | int]:
    """Return the items of synthetic requests, as `LoadTestConfig.items` chooses them."""
    remedy = "give a file with one item id per line, a number of items from 1, or nothing for items of the server"
    if not items:
        found = items_of(url)
    elif items.isdigit() and int(items) > 0:
        return range(1, int(items) + 1)
    else:
        try:
            found = [line.strip() for line in Path(items).read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, ValueError) as error:
            raise UserError(f"cannot be read: {error}", option="items", value=items, remedy=remedy) from error
    if not found:
        raise UserError("names no items", option="items", value=items or url, remedy=remedy)
    return found


def _asked(url: str, path: str) -> Any:
    """Return the JSON answer of a server to GET; raise a ValueError if it is not JSON."""
    parts = urlsplit(url)
    connection = _connection(parts, 30.0)
    try:
        key = key_in_environment()
        connection.request("GET", path, headers={"authorization": f"Bearer {key}"} if key else {})
        response = connection.getresponse()
        if response.status in (401, 403):
            remedy = f"put a public key of it into {KEY_VARIABLE}"
            raise UserError("asks for a key", option="URL", value=url, remedy=remedy)
        return json.loads(response.read())
    except (OSError, http.client.HTTPException) as error:
        remedy = remedy_without_answer(error)
        raise UserError(f"does not answer: {error}", option="URL", value=url, remedy=remedy) from error
    finally:
        connection.close()


def _connection(parts: SplitResult, timeout_s: float) -> http.client.HTTPConnection:
    """With the certificate of a server checked, if it speaks TLS."""
    host = parts.hostname or "127.0.0.1"
    if parts.scheme == "https":
        return http.client.HTTPSConnection(host, parts.port, timeout=timeout_s, context=ssl.create_default_context())
    return http.client.HTTPConnection(host, parts.port, timeout=timeout_s)


def key_in_environment() -> str:
    """Not an option: whoever lists the processes of a machine sees those."""
    return os.environ.get(KEY_VARIABLE, "")


def reads_from(models: Mapping[str, Any]) -> RequiredInputs:
    """What the model that ranks reads, of those that a server describes."""
    model = models.get("ranking") or models["retrieval"]
    return RequiredInputs(**{name: tuple(model[name]) for name in ("actions", "features", "user_features")})


def replay(url: str, cfg: LoadTestConfig, announce: Callable[[str], None] = lambda _: None) -> list[dict[str, Any]]:
    """Measure one trial, or those of a search with the best one last; return a row of each. announce: called with one
    line about the requests that are sent."""
    check_server(url)
    reads = RequiredInputs() if cfg.recorded else reads_of(url)
    items = [] if cfg.recorded else chosen_items(url, cfg.items)
    announce(_sent_in_words(cfg, items))
    trials: list[dict[str, Any]] = []

    def measure(value: float) -> Trial:
        rate = value if cfg.finds == "rate" else cfg.rate
        length = round(value) if cfg.finds == "history" else cfg.history
        load = make_load(cfg, rate, length, reads, items)
        trial = run_punctually(send_load(url, load, cfg.signal_ms / 1e3))
        trials.append(row_of(trial, cfg, length))
        return trial

    if cfg.finds == "":
        measure(cfg.rate)
    else:
        start = cfg.rate if cfg.finds == "rate" else float(cfg.history)
        best, _ = largest(measure, cfg.slo_ms, start=start)
        trials.append({**trials[-1], "largest": cfg.finds, "value": best})
    return trials


def _sent_in_words(cfg: LoadTestConfig, items: Sequence[str | int]) -> str:
    if cfg.recorded:
        return f"sending the recorded requests of {cfg.recorded}"
    named = "that the server named" if not cfg.items else f"of --items {cfg.items}"
    return (
        f"sending synthetic requests: random histories and candidates of {len(items):,} items {named}; "
        "give real requests by --recorded FILE"
    )


def check_server(url: str) -> None:
    """Raise a UserError unless somebody listens: a load that nobody hears would look like one that was refused."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        remedy = "give http://HOST:PORT or https://HOST:PORT"
        raise UserError("is not the address of a server", option="URL", value=url, remedy=remedy)
    connection = _connection(parts, 5.0)
    try:
        connection.connect()
    except OSError as error:
        remedy = "start one with `nestrec serve`, or check host and port"
        if isinstance(error, ssl.SSLError):
            remedy = remedy_without_answer(error)
        raise UserError(f"nobody answers there: {error}", option="URL", value=url, remedy=remedy) from error
    finally:
        connection.close()


def make_load(
    cfg: LoadTestConfig, rate: float, length: int, reads: RequiredInputs, items: Sequence[str | int] = ()
) -> RequestSchedule:
    """items: of synthetic requests."""
    if cfg.recorded:
        return recorded_load(Path(cfg.recorded))
    rng = np.random.default_rng(cfg.seed)
    at_s = poisson_arrivals(rate, cfg.duration_s, cfg.seed)
    users: list[int] = []
    bodies, signals = [], []
    for _ in at_s:
        is_back = bool(users) and rng.random() < cfg.returning
        user = users[rng.integers(len(users))] if is_back else int(rng.integers(cfg.users))
        users.append(user)
        signal, body = made_up_request(user, length, cfg, rng, reads, items=items)
        signals.append(json.dumps(signal).encode())
        bodies.append(json.dumps(body).encode())
    return RequestSchedule(at_s.tolist(), ["/v1/rank"] * len(bodies), bodies, signals if cfg.signal_ms else [])


def made_up_request(
    user: int,
    length: int,
    cfg: LoadTestConfig,
    rng: np.random.Generator,
    reads: RequiredInputs,
    *,
    items: Sequence[str | int],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(signal, ranking request); a user's history is a function of the user."""
    own = np.random.default_rng((cfg.seed, user))
    times = (np.arange(length) * 60_000 + 1_600_000_000_000).tolist()
    history: dict[str, Any] = {"items": _drawn(items, own, length), "times_ms": times}
    if reads.actions:
        history["actions"] = own.choice(reads.actions, length).tolist()
    if reads.features:
        history["features"] = {name: [None] * length for name in reads.features}
    common: dict[str, Any] = {"user": str(user), "history": history, "now_ms": 1_700_000_000_000}
    if reads.user_features:
        common["user_features"] = dict.fromkeys(reads.user_features)
    context = {"context": dict.fromkeys(reads.features)} if reads.features else {}
    candidates = _drawn(items, rng, cfg.candidates)
    patience = {"timeout_ms": 10_000}
    signal = {**common, **patience, "num_candidates": cfg.candidates}
    return signal, {**common, **context, **patience, "candidates": candidates}


def _drawn(items: Sequence[str | int], rng: np.random.Generator, count: int) -> list[str | int]:
    return [items[index] for index in rng.integers(len(items), size=count).tolist()]


def recorded_load(path: Path) -> RequestSchedule:
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        at_s = [float(line["at_s"]) for line in lines]
        bodies = [json.dumps(line["body"]).encode() for line in lines]
        return RequestSchedule(at_s, [str(line["path"]) for line in lines], bodies, [])
    except (OSError, ValueError, KeyError, TypeError) as error:
        remedy = 'give JSON lines with "at_s", "path" and "body"'
        raise UserError("is no recorded load", option="recorded", value=str(path), remedy=remedy) from error


async def send_load(url: str, load: RequestSchedule, signal_s: float) -> Trial:
    """Send a load and wait for its answers."""
    parts = urlsplit(url)
    context = ssl.create_default_context() if parts.scheme == "https" else None
    port = parts.port or (http.client.HTTP_PORT if context is None else http.client.HTTPS_PORT)
    client = HttpClient(parts.hostname or "127.0.0.1", port, key=key_in_environment(), context=context)

    async def send(number: int) -> bool:
        if load.signals:
            asyncio.get_running_loop().create_task(client.post("/v1/preinfer", load.signals[number]))
            await asyncio.sleep(signal_s)
        return (await client.post(load.paths[number], load.bodies[number])).status == 200

    trial = await run_open_loop(load.at_s, send, lead_s=signal_s if load.signals else 0.0)
    await client.close()
    return trial


def row_of(trial: Trial, cfg: LoadTestConfig, length: int) -> dict[str, Any]:
    percentiles = {f"p{q}_ms": _rounded(trial.percentile_ms(q)) for q in (50, 90, 99)}
    return {
        "rate": round(trial.rate, 2),
        "requests": len(trial.latency_ms),
        "refused": trial.num_refused,
        "history": length,
        "candidates": cfg.candidates,
        **percentiles,
        "slo_ms": cfg.slo_ms,
        "meets": trial.meets(cfg.slo_ms),
        "goodput": round(trial.goodput(cfg.slo_ms), 2),
        "generator_late_p99_ms": _rounded(trial.lateness_ms),
    }


def _rounded(value: float) -> float | None:
    """JSON has no infinity: none means that the request was never answered."""
    return round(value, 3) if math.isfinite(value) else None
