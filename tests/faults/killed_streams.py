"""`nestrec follow` under kill -9, beside the same stream undisturbed."""

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
from support.stream_fixtures import copied, follow_command, source_of, stream_events
from support.tiny_runs import config_of, make_datasets

ENV = {"OMP_NUM_THREADS": "1"}
WINDOW = 20
MOST_WINDOWS_A_KILL = 3
LIMIT_S = 3600.0
"""of one start of the command: far more than it takes, on two ranks of a machine that others share, too"""
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


@dataclass(frozen=True, slots=True)
class Base:
    """A run that has been trained for a few steps, and its data; whoever follows takes a copy."""

    run: Path
    data: Path

    @staticmethod
    def make(folder: Path) -> "Base":
        make_datasets(folder)
        more = {"training.max_steps": 3, "training.evaluate_every_epochs": 0}
        Trainer(config_of("hstu", folder, more), folder / "run", Topology.single()).train()
        return Base(folder / "run", folder / "sequences")


def random_kills(data: Path, *, seed: int, number: int, ranks: int) -> list[Fault]:
    """By turns at a random place of the program, and at a random moment of whatever it is doing then."""
    draw = random.Random(seed)
    kills: list[Fault] = []
    for place in range(number):
        windows = draw.randrange(1, MOST_WINDOWS_A_KILL + 1)
        if place % 2 == 0:
            kills.append(FailPoint(f"{draw.choice(POINTS)}@{windows}=kill"))
        else:
            is_due = windows_pass(data, windows, delay_s=draw.uniform(0.0, 0.3))
            kills.append(KillWhen(is_due) if ranks == 1 else KillWhen(is_due, rank_of(draw.randrange(ranks))))
    return kills


def windows_pass(data: Path, number: int, *, delay_s: float) -> Callable[[], bool]:
    """A condition: so many windows have been appended since it was first asked, and then some time has passed."""
    seen: set[int] = set()

    def is_reached() -> bool:
        seen.add((data / "card.json").stat().st_mtime_ns)
        return len(seen) > number

    return delayed(is_reached, delay_s)


def on_ranks(command: list[str], ranks: int) -> list[str]:
    """A rank that dies takes the others along: `launch` ends, and is started again."""
    python, *rest = command
    return command if ranks == 1 else [python, "-m", "nestrec", "launch", "-n", str(ranks), *rest[2:]]


def check_kills(base: Base, folder: Path, source: str, *, ranks: int, faults: list[Fault], events: int) -> int:
    """Follow a stream with and without faults: state, data and number of events are the same; how often it started."""
    options = {"window.events": WINDOW, "idle_s": 0.05, "replay_share": 0.1}
    runs = {name: copied(base.run, base.data, folder / name) for name in ("whole", "cut")}
    commands = {name: on_ranks(follow_command(source, run, options), ranks) for name, run in runs.items()}
    given: dict[str, Any] = {"env": ENV, "limit_s": LIMIT_S, "is_forked": ranks == 1}
    for name, sent in (("whole", []), ("cut", faults)):
        tell = partial(print, f"{source}, {ranks} ranks, {name}:", flush=True)
        history = run_with_faults(commands[name], sent, **given, tell=tell)
    assert run_digest(runs["cut"]) == run_digest(runs["whole"])
    cards = [DatasetCard.load(folder / name / "data") for name in ("whole", "cut")]
    assert cards[0].digest_of_files == cards[1].digest_of_files
    assert cards[0].counts.events - DatasetCard.load(base.data).counts.events == events // WINDOW * WINDOW
    return len(history)


def check_random_kills(base: Base, folder: Path, kind: str, *, ranks: int, number: int, seed: int) -> dict[str, Any]:
    """So many kills of one stream; what was done, as a row of results."""
    num_events = WINDOW * (MOST_WINDOWS_A_KILL * number + 6)
    with source_of(kind, folder, stream_events(num_events, seed)) as source:
        faults = random_kills(folder / "cut" / "data", seed=seed, number=number, ranks=ranks)
        starts = check_kills(base, folder, source, ranks=ranks, faults=faults, events=num_events)
    done = {
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
    print(json.dumps(done), flush=True)
    return done
