"""Compares `nestrec train-stream` under SIGKILL with an uninterrupted run on the same stream."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nestrec.data.dataset_card import DatasetCard
from nestrec.distributed import Topology
from nestrec.training.state import run_digest
from nestrec.training.trainer import Trainer
from support.fault_runner import FailPoint, Fault, KillWhen, delayed, rank_of, run_with_faults
from support.stream_fixtures import copy_run, source_of, stream_command, stream_events
from support.tiny_runs import config_of, make_datasets

ENV = {"OMP_NUM_THREADS": "1"}
WINDOW = 20
MAX_WINDOWS_PER_KILL = 3
LIMIT_S = 3600.0
"""Time limit of one start of the command, far more than it takes on two ranks of a busy machine."""
FAIL_POINTS = (
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


@dataclass(frozen=True, slots=True)
class Base:
    """A run that was trained for a few steps, and its dataset; each test trains on copies of them."""

    run: Path
    data: Path

    @staticmethod
    def make(folder: Path) -> "Base":
        make_datasets(folder)
        more = {"training.max_steps": 3, "training.eval_every_epochs": 0}
        Trainer(config_of("hstu", folder, more), folder / "run", Topology.single()).train()
        return Base(folder / "run", folder / "sequences")


def random_kills(data: Path, *, seed: int, number: int, ranks: int) -> list[Fault]:
    """Return kills that alternate between random fail points and random moments."""
    draw = random.Random(seed)
    kills: list[Fault] = []
    for index in range(number):
        windows = draw.randrange(1, MAX_WINDOWS_PER_KILL + 1)
        if index % 2 == 0:
            kills.append(FailPoint(f"{draw.choice(FAIL_POINTS)}@{windows}=kill"))
        else:
            is_due = windows_pass(data, windows, delay_s=draw.uniform(0.0, 0.3))
            kills.append(KillWhen(is_due) if ranks == 1 else KillWhen(is_due, rank_of(draw.randrange(ranks))))
    return kills


def windows_pass(data: Path, number: int, *, delay_s: float) -> Callable[[], bool]:
    """Return a condition that holds `delay_s` after `number` windows were appended since its first evaluation."""
    versions: set[int] = set()

    def is_reached() -> bool:
        versions.add((data / "card.json").stat().st_mtime_ns)
        return len(versions) > number

    return delayed(is_reached, delay_s)


def on_ranks(command: list[str], ranks: int) -> list[str]:
    """Return the command for several ranks; if a rank dies, `nestrec launch` exits and is started again."""
    python, *rest = command
    return command if ranks == 1 else [python, "-m", "nestrec", "launch", "-n", str(ranks), *rest[2:]]


def check_kills(base: Base, folder: Path, source: str, *, ranks: int, faults: list[Fault], events: int) -> int:
    """Train on a stream with and without faults, and compare state, dataset and number of events.

    Returns:
        Number of starts of the command with faults.
    """
    options = {"window.events": WINDOW, "stop_after_idle_s": 0.05, "replay_fraction": 0.1}
    runs = {name: copy_run(base.run, base.data, folder / name) for name in ("uninterrupted", "cut")}
    commands = {name: on_ranks(stream_command(source, run, options), ranks) for name, run in runs.items()}
    arguments: dict[str, Any] = {"env": ENV, "limit_s": LIMIT_S, "is_forked": ranks == 1}
    for name, faults_of_run in (("uninterrupted", []), ("cut", faults)):
        on_attempt = partial(print, f"{source}, {ranks} ranks, {name}:", flush=True)
        history = run_with_faults(commands[name], faults_of_run, **arguments, on_attempt=on_attempt)
    assert run_digest(runs["cut"]) == run_digest(runs["uninterrupted"])
    cards = [DatasetCard.load(folder / name / "data") for name in ("uninterrupted", "cut")]
    assert cards[0].digest_of_files == cards[1].digest_of_files
    assert cards[0].counts.events - DatasetCard.load(base.data).counts.events == events // WINDOW * WINDOW
    return len(history)


def check_random_kills(base: Base, folder: Path, kind: str, *, ranks: int, number: int, seed: int) -> dict[str, Any]:
    """Check `number` random kills on one stream, and return a row of results."""
    num_events = WINDOW * (MAX_WINDOWS_PER_KILL * number + 6)
    with source_of(kind, folder, stream_events(num_events, seed)) as source:
        faults = random_kills(folder / "cut" / "data", seed=seed, number=number, ranks=ranks)
        starts = check_kills(base, folder, source, ranks=ranks, faults=faults, events=num_events)
    row = {
        "what": "stream",
        "source": kind,
        "ranks": ranks,
        "seed": seed,
        "events": num_events,
        "windows": num_events // WINDOW,
        "kills": number,
        "starts": starts,
        "equal_to_undisturbed": True,
    }
    print(json.dumps(row), flush=True)
    return row
