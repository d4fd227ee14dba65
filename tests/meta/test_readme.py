"""Checks the first pages: their commands run as printed, and they mention common pitfalls."""

import ast
import asyncio
import itertools
import json
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from nestrec.base.config_values import parse_time_ms
from nestrec.cli.app import app
from nestrec.serving.core.request_limits import LimitsConfig
from nestrec.serving.http.http_app import App
from nestrec.serving.service.inference_service import Service, ServiceConfig

ROOT = Path(__file__).resolve().parents[2]


COMMANDS = ("prepare", "train", "report", "export", "serve")


@dataclass(frozen=True)
class OwnLogExample:
    """The example of a page that leads from a log to recommendations."""

    log: list[str]
    """First lines of the log, with the header."""
    commands: list[list[str]]
    """Arguments of each `nestrec` command, in the order of the page."""
    requests: list[tuple[str, dict[str, Any]]]
    """Path and body of each curl command."""

    def command(self, name: str) -> list[str]:
        """Return the first command of this name."""
        return next(command for command in self.commands if command[0] == name)


def own_log_example(text: str) -> OwnLogExample:
    shell = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.S))
    lines = [shlex.split(line, comments=True) for line in shell.replace("\\\n", " ").splitlines() if "nestrec" in line]
    commands = [words[1:] for words in lines if words[0] == "nestrec" and words[1] in COMMANDS]
    found = re.findall(r"http://127\.0\.0\.1:8000(/v1/\w+)[ \\\n]*-d '(\{.*?\})'\n", shell, re.S)
    requests = [(path, json.loads(body)) for path, body in found]
    (log,) = re.findall(r"```csv\n(.*?)```", text, re.S)
    return OwnLogExample(log.splitlines(), commands, requests)


def run_commands(commands: list[list[str]]) -> None:
    """Run all commands except `serve`; training is limited to two steps."""
    runner = CliRunner()
    for command in commands:
        if command[0] != "serve":
            limit = ["--training.max_steps", "2"] if command[0] == "train" else []
            done = runner.invoke(app, [*command, *limit])
            assert done.exception is None, (done.output, done.exception)


@pytest.mark.parametrize("times", ["iso", "ms"])
def test_readme_leads_from_log_to_recommendations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: str) -> None:
    example = own_log_example((ROOT / "README.md").read_text().partition("## From your own logs")[2])
    monkeypatch.chdir(tmp_path)
    log = list(example.log)
    for user, item in itertools.product(range(20), range(8)):
        log.append(f"u{user},sku-{(user + item) % 30},2026-10-{10 + item}T12:30:00Z,{('view', 'buy')[item % 2]}")
    prepare = example.command("prepare")
    if times == "ms":
        rows = [line.split(",") for line in log[1:]]
        log[1:] = [",".join((*row[:2], str(parse_time_ms(row[2], "ts")), row[3])) for row in rows]
        prepare[prepare.index("--log.time_unit") + 1] = "ms"
        prepare += ["--log.actions", "view=event:view,buy=event:buy"]
    Path("events.csv").write_text("\n".join(log) + "\n")
    assert [command[0] for command in example.commands] == list(COMMANDS)
    run_commands(example.commands)
    assert example.command("serve") == ["serve", "--model", example.command("export")[2], "--port", "8000"]
    ((path, request),) = example.requests
    (response,) = ask(Path(example.command("export")[2]), (path, request))
    assert len(response["items"]) == request["k"]
    assert response["unknown_ids"] == []


def test_quickstart_leads_from_log_to_recommendations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = own_log_example((ROOT / "docs" / "get-started" / "quickstart.md").read_text())
    monkeypatch.chdir(tmp_path)
    items = ["50", "100", "172", "181", "258", *map(str, range(20))]
    log = list(example.log)
    for user, event in itertools.product(range(20), range(8)):
        log.append(f"{user},{items[(user + event) % len(items)]},4,{881250000 + 1000 * event}")
    Path("events.csv").write_text("\n".join(log) + "\n")
    commands = [command for command in example.commands if "demo_sasrec" not in command]
    assert [command[0] for command in commands] == [*COMMANDS, "export", "serve"]
    run_commands(commands)
    for export, serve in (commands[3:5], commands[5:7]):
        assert serve == ["serve", "--model", export[2]]
    model, new_users_model = (Path(command[2]) for command in commands if command[0] == "export")
    by_history, events, by_user, stranger = example.requests
    assert [path for path, _ in example.requests] == ["/v1/recommend", "/v1/events", "/v1/recommend", "/v1/recommend"]
    known, stored, remembered, rejected = ask(model, *example.requests)
    assert len(known["items"]) == by_history[1]["k"]
    assert (known["unknown_ids"], known["defaults_used"]) == ([], [])
    assert stored == {"events": len(events[1]["history"]["items"])}
    assert len(remembered["items"]) == by_user[1]["k"]
    assert [default["field"] for default in remembered["defaults_used"]] == ["now_ms"]
    assert "--defaults.history ITEM,ITEM --defaults.times now" in rejected["error"]["remedy"]
    (recommended,) = ask(new_users_model, stranger)
    assert len(recommended["items"]) == stranger[1]["k"]
    assert {"field": "history", "value": {"items": ["50", "258", "100"]}} in recommended["defaults_used"]


def ask(model: Path, *requests: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the responses of a server of this model."""
    service = Service.load([model], ServiceConfig())
    try:
        return asyncio.run(responses(service, requests))
    finally:
        service.close()


async def responses(service: Service, requests: Iterable[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    transport = httpx.ASGITransport(App(service, LimitsConfig(default_timeout_ms=10_000)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return [(await client.post(path, json=body)).json() for path, body in requests]


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("README.md", "Without `make`: `pip install .`"),
        ("README.md", "`source .venv/bin/activate` puts `nestrec` and `torchrun` on the path"),
        ("README.md", "do not depend on the number of ranks, except where"),
        ("README.md", "negatives from the batch (`in_batch`, `groups`, `logit_sharing`)"),
        ("README.md", "bounded by `max_rows` fills up and evicts shard by shard"),
        ("README.md", "`task.negatives.lookup_dtype=float16` rounds"),
        ("docs/many-machines.md", "torchrun itself then ends with code 1 and a traceback of its own"),
        ("docs/serving.md", 'a list of names (`["click", "like"]`), or the sum of their bits'),
    ],
)
def test_pages_mention_common_pitfalls(page: str, words: str) -> None:
    assert words in " ".join((ROOT / page).read_text().split())


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/index.md",
        "docs/get-started/quickstart.md",
        "docs/own-logs.md",
        "docs/serving.md",
        "nestrec/__init__.py",
    ],
)
def test_pages_show_valid_histories_for_python_users(page: str) -> None:
    """The recipes that the pages train read times, so a history without times would be rejected."""
    text = (ROOT / page).read_text()
    shown = re.findall(r"\{\s*\"items\": \[[^{}]*?\"times_ms\": \[[^{}]*?\}", text)
    assert shown
    assert all(len(set(map(len, ast.literal_eval(history).values()))) == 1 for history in shown)
    assert not re.search(r"recommend\((history=)?\[", text)
