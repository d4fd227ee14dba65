"""`nestrec follow` killed with -9: started again, it ends as a run that was never disturbed, with every event once."""

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from nestrec.data.card import Card
from nestrec.distributed import Topology
from nestrec.testing.faults import FailPoint, Fault, run_with_faults
from nestrec.testing.streams import copied, drop_files, follow_command, stream_events, topic
from nestrec.testing.tiny_runs import config_of, make_datasets
from nestrec.training.run_digest import run_digest
from nestrec.training.trainer import Trainer

pytestmark = pytest.mark.timeout(300)
ENV = {"OMP_NUM_THREADS": "1"}
BASE_STEPS = 3


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run, and its data."""
    folder = tmp_path_factory.mktemp("base")
    make_datasets(folder)
    more = {"training.max_steps": BASE_STEPS, "training.evaluate_every_epochs": 0}
    Trainer(config_of("hstu", folder, more), folder / "run", Topology.single()).train()
    return folder / "run", folder / "sequences"


def on_ranks(command: list[str], ranks: int) -> list[str]:
    """A rank that dies takes the others along: `launch` ends, and is started again."""
    python, *rest = command
    return command if ranks == 1 else [python, "-m", "nestrec", "launch", "-n", str(ranks), *rest[2:]]


def check_kills(
    base: tuple[Path, Path], folder: Path, source: str, *, ranks: int, faults: list[Fault], events: int
) -> None:
    options = {"window.events": 20, "idle_s": 0.05, "replay_share": 0.1}
    runs = {name: copied(*base, folder / name) for name in ("whole", "cut")}
    commands = {name: on_ranks(follow_command(source, run, options), ranks) for name, run in runs.items()}
    run_with_faults(commands["whole"], [], env=ENV, limit_s=200)
    run_with_faults(commands["cut"], faults, env=ENV, limit_s=200)
    assert run_digest(runs["cut"]) == run_digest(runs["whole"])
    cards = [Card.load(folder / name / "data") for name in ("whole", "cut")]
    assert cards[0].digest_of_files == cards[1].digest_of_files
    assert cards[0].counts.events - Card.load(base[1]).counts.events == events // 20 * 20


def test_kills_in_the_middle_of_an_append_and_of_a_window_change_nothing(
    base: tuple[Path, Path], tmp_path: Path
) -> None:
    drop_files(tmp_path / "events", stream_events(64), events_a_file=25)
    faults: list[Fault] = [FailPoint("data.append.before_card@2=kill"), FailPoint("train.step@2=kill")]
    check_kills(base, tmp_path, str(tmp_path / "events"), ranks=1, faults=faults, events=64)


POINTS = (
    "stream.read",
    "data.append.after_split",
    "data.append.before_layer",
    "data.append.before_card",
    "data.append.after_card",
    "train.step",
    "checkpoint.between_files",
    "checkpoint.before_rename",
    "checkpoint.after_rename",
    "follow.window",
)


def random_kills(*, seed: int, number: int) -> Iterator[Fault]:
    """At a random place of what happens in the first windows after a start."""
    draw = random.Random(seed)
    for _ in range(number):
        yield FailPoint(f"{draw.choice(POINTS)}@{draw.randrange(1, 4)}=kill")


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["folder", "kafka"])
def test_50_random_kills_change_nothing(base: tuple[Path, Path], tmp_path: Path, kind: str, ranks: int) -> None:
    """13 or 12 for each source and number of ranks."""
    events, number = stream_events(900), 13 if ranks == 1 else 12
    drop_files(tmp_path / "events", events, events_a_file=70)
    faults = list(random_kills(seed=ranks + 10 * (kind == "kafka"), number=number))
    with contextlib.nullcontext(str(tmp_path / "events")) if kind == "folder" else topic(events) as source:
        check_kills(base, tmp_path, source, ranks=ranks, faults=faults, events=900)
