"""What the first pages say is so: commands are run as they stand there, and what a reader has to know is said."""

import ast
import asyncio
import itertools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from nestrec.base.config_values import moment_ms
from nestrec.cli.app import app
from nestrec.serving.core.request_limits import LimitsConfig
from nestrec.serving.http.http_app import App
from nestrec.serving.service.inference_service import Service, ServiceConfig

ROOT = Path(__file__).resolve().parents[2]


def own_log_section() -> tuple[list[str], dict[str, list[str]], list[dict[str, Any]]]:
    """Return the first lines of the log, the commands by name, and the requests of the README."""
    section = (ROOT / "README.md").read_text().partition("## From your own logs")[2]
    blocks = dict(re.findall(r"```(csv|sh)\n(.*?)```", section.partition("From another terminal")[0], re.S))
    lines = [shlex.split(line, comments=True) for line in blocks["sh"].splitlines()]
    requests = [json.loads(text) for text in re.findall(r"-d '(\{.*?\})'\n", section, re.S)]
    commands = {words[1]: words[1:] for words in lines}
    found = re.search(r"`nestrec (export [^`]*--defaults[^`]*)`", section)
    assert found is not None
    commands["export for new users"] = shlex.split(found[1])
    return blocks["csv"].splitlines(), commands, requests


@pytest.mark.parametrize("times", ["iso", "ms"])
def test_readme_leads_from_a_log_to_recommendations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: str
) -> None:
    log, commands, (request, stranger) = own_log_section()
    monkeypatch.chdir(tmp_path)
    for user, item in itertools.product(range(20), range(8)):
        log.append(f"u{user},sku-{(user + item) % 30},2026-10-{10 + item}T12:30:00Z,{('view', 'buy')[item % 2]}")
    words = list(commands["prepare"])
    if times == "ms":
        rows = [line.split(",") for line in log[1:]]
        log[1:] = [",".join((*row[:2], str(moment_ms(row[2], "ts")), row[3])) for row in rows]
        words[words.index("--log.time_unit") + 1] = "ms"
        words += ["--log.actions", "view=event:view,buy=event:buy"]
    Path("events.csv").write_text("\n".join(log) + "\n")
    runner = CliRunner()
    train = [*commands["train"], "--training.max_steps", "2"]
    for command in (words, train, *(commands[name] for name in ("report", "export", "export for new users"))):
        done = runner.invoke(app, command)
        assert done.exception is None, (done.output, done.exception)
    assert commands["serve"] == ["serve", "--model", "models/mine"]
    known, refused = ask(Path("models/mine"), request, stranger)
    assert len(known["items"]) == request["k"]
    assert known["unknown"] == []
    assert "--defaults.history ITEM,ITEM --defaults.times now" in refused["error"]["remedy"]
    (recommended,) = ask(Path(commands["export for new users"][2]), stranger)
    assert len(recommended["items"]) == stranger["k"]
    assert {"field": "history", "value": {"items": ["sku-12", "sku-7"]}} in recommended["defaults"]


def ask(model: Path, *requests: dict[str, Any]) -> list[dict[str, Any]]:
    service = Service.load([model], ServiceConfig())
    try:
        return [asyncio.run(answer(service, request)) for request in requests]
    finally:
        service.close()


async def answer(service: Service, request: dict[str, Any]) -> dict[str, Any]:
    transport = httpx.ASGITransport(App(service, LimitsConfig(default_timeout_ms=10_000)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        found: dict[str, Any] = (await client.post("/v1/recommend", json=request)).json()
        return found


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("README.md", "Without `make`: `pip install .`"),
        ("README.md", "`source .venv/bin/activate` puts `nestrec` and `torchrun` on the path"),
        ("README.md", "do not depend on the number of ranks, except where"),
        ("README.md", "negatives from the batch (`in_batch`, `groups`, `sharing`)"),
        ("README.md", "bounded by `max_rows` fills up and evicts shard by shard"),
        ("README.md", "`task.negatives.lookup=float16` rounds"),
        ("docs/many-machines.md", "torchrun itself then ends with code 1 and a traceback of its own"),
        ("docs/serving.md", 'a list of names (`["click", "like"]`), or the sum of their bits'),
    ],
)
def test_pages_say_what_a_reader_would_otherwise_find_out_the_hard_way(page: str, words: str) -> None:
    assert words in " ".join((ROOT / page).read_text().split())


@pytest.mark.parametrize("page", ["README.md", "docs/own-logs.md", "docs/tutorial.md", "nestrec/__init__.py"])
def test_pages_show_python_users_a_history_that_their_models_take(page: str) -> None:
    """Recipes that pages train read times: a list of ids alone would be refused."""
    text = (ROOT / page).read_text()
    shown = re.findall(r"\{\"items\": \[[^{}]*?\"times_ms\": \[[^{}]*?\}", text)
    assert shown
    assert all(len(set(map(len, ast.literal_eval(history).values()))) == 1 for history in shown)
    assert not re.search(r"recommend\((history=)?\[", text)
