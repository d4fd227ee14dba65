"""Streams for tests: a small run and events to follow, as files of a folder or messages of a topic."""

import json
import random
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nestrec.base.config_overrides import with_overrides
from nestrec.data.dataset_card import DatasetCard
from nestrec.data.synthetic.synthetic_logs import SPAN_MS, START_MS
from nestrec.distributed import Topology
from nestrec.exporters.version_publisher import open_publishing
from nestrec.training.stream_trainer import StreamConfig, StreamTrainer
from support.tiny_runs import NUM_ITEMS, NUM_USERS

COLUMNS = {
    "log.time": "time_ms",
    "log.time_unit": "ms",
    "log.actions": "click=click,like=like,long_view=long_view",
}
"""What the fields of an event mean, as options."""
BY_COUNT = {"window.events": 30, "idle_s": 0.01, "replay_share": 0.2}
BY_TIME = {"window.events": "none", "window.hours": 0.01, "window.lateness_s": 20, "idle_s": 0.01}
"""Two rules for windows, as options."""


class Crash(Exception):
    """What ends a run in a test."""


def crash() -> None:
    """For a point of failure."""
    raise Crash


def follow(source: str, run: Path, options: Mapping[str, Any], **given: Any) -> StreamTrainer:
    """A run has followed a source until that was idle."""
    given.setdefault("open_publishing", open_publishing)
    follower = StreamTrainer(source, run, Topology.single(), follow_options(options), **given)
    follower.follow()
    return follower


def without_times(card: DatasetCard) -> list[Any]:
    """The generations of a dataset, but for when they were made."""
    return [(g.number, g.digest, g.events, g.stream.get("position")) for g in card.generations]


def stream_events(number: int, seed: int = 0) -> list[dict[str, Any]]:
    """Events of old and new users and items after those of the tiny dataset, some of them late."""
    draw = random.Random(seed)
    events = []
    for place in range(number):
        late = draw.randrange(0, 40_000) if draw.random() < 0.2 else 0
        user = draw.randrange(NUM_USERS + number // 40)
        item = 1 + draw.randrange(NUM_ITEMS + number // 20)
        time_ms = START_MS + 9 * SPAN_MS + place * 1000 - late
        bits = {name: draw.randrange(2) for name in ("click", "like", "long_view")}
        events.append({"user": f"{user}", "item": f"{item}", "time_ms": time_ms, **bits})
    return events


def drop_files(folder: Path, events: Sequence[Mapping[str, Any]], events_a_file: int) -> None:
    """Events as files of JSON lines, each appearing whole."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, start in enumerate(range(0, len(events), events_a_file)):
        lines = [json.dumps(event) for event in events[start : start + events_a_file]]
        path = folder / f"part-{number:05d}.jsonl"
        path.with_name(f".{path.name}").write_text("\n".join(lines) + "\n")
        path.with_name(f".{path.name}").rename(path)


@contextmanager
def source_of(
    kind: str, folder: Path, events: Sequence[Mapping[str, Any]], *, events_a_file: int = 70
) -> Iterator[str]:
    """The address of a folder of files, or of a topic whose brokers live in this process."""
    if kind == "folder":
        drop_files(folder / "events", events, events_a_file)
        yield str(folder / "events")
    else:
        with topic(events) as address:
            yield address


@contextmanager
def topic(events: Sequence[Mapping[str, Any]], partitions: int = 3) -> Iterator[str]:
    """The address of a topic with these events, in the mock brokers of the client's own library."""
    from confluent_kafka import Producer

    settings = {"test.mock.num.brokers": 1, "topic.metadata.refresh.interval.ms": 200}
    producer = Producer({**settings, "linger.ms": 0})
    brokers = producer.list_topics(timeout=10).brokers
    name = "events"
    producer.list_topics(name, timeout=10)  # the mock makes a topic of four partitions when it is asked for one
    for place, event in enumerate(events):
        producer.produce(name, json.dumps(event).encode(), partition=place % partitions)
    assert producer.flush(20) == 0
    yield f"kafka://{','.join(f'{b.host}:{b.port}' for b in brokers.values())}/{name}"
    del producer


def copied(run: Path, data: Path, target: Path) -> Path:
    """A run and its data in a place of their own: the run's folder."""
    shutil.copytree(run, target / "run")
    shutil.copytree(data, target / "data")
    config = json.loads((target / "run" / "config.json").read_text())
    config["data"]["folder"] = str(target / "data")
    (target / "run" / "config.json").write_text(json.dumps(config))
    return target / "run"


def follow_command(source: str, run: Path, options: Mapping[str, object]) -> list[str]:
    """`nestrec follow` as the arguments of python."""
    given = [f"--{name}={value}" for name, value in {**COLUMNS, **options}.items()]
    return [sys.executable, "-m", "nestrec", "follow", source, "--run", str(run), *given]


def follow_options(options: Mapping[str, object]) -> StreamConfig:
    """The same as a config."""
    return with_overrides(StreamConfig(), {name: str(value) for name, value in {**COLUMNS, **options}.items()})
