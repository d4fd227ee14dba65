"""What the first pages say is so: commands are run as they stand there, and what a reader has to know is said."""

import ast
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nestrec.base.overriding import parse_overrides
from nestrec.cli.app import app
from nestrec.data.dataset import Dataset
from nestrec.library.configured import configured

ROOT = Path(__file__).resolve().parents[2]


def test_the_commands_for_a_log_of_ones_own_work_as_they_stand_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = (ROOT / "README.md").read_text().partition("## From your own logs")[2]
    block = re.search(r"```sh\n(.*?)```", section, re.S)
    assert block is not None
    commands = {words[1]: words[1:] for words in (line.split() for line in block[1].splitlines())}
    monkeypatch.chdir(tmp_path)
    events = [f"u{u},i{i},2026-11-0{1 + i}T12:30:00" for u in range(6) for i in range(6)]
    Path("events.csv").write_text("\n".join(["uid,iid,ts", *events]) + "\n")
    prepared = CliRunner().invoke(app, commands["prepare"])
    assert prepared.exception is None, prepared.output
    card = Dataset.open(Path("data/mine")).card
    assert (card.counts.events, card.has_timestamps) == (36, True)
    launch = commands["launch"][: commands["launch"].index("--output")]
    assert launch[:5] == ["launch", "-n", "2", "train", "demo"]
    assert configured("demo", parse_overrides(launch[5:])).data.folder == "data/mine"


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
