"""Streams for tests of online training: events as files of a folder or as messages of a topic."""

import json
import random
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nestrec.base.config_overrides import apply_overrides
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
"""Options that describe the fields of an event."""
BY_COUNT = {"window.events": 30, "stop_after_idle_s": 0.01, "replay_fraction": 0.2}
BY_TIME = {"window.events": "none", "window.hours": 0.01, "window.allowed_lateness_s": 20, "stop_after_idle_s": 0.01}
"""Options of two kinds of stream windows: by number of events and by time."""


class Crash(Exception):
    """Exception that ends a run in a test."""


def crash() -> None:
    """Raise `Crash`, as the action of a fail point."""
    raise Crash


def follow(source: str, run: Path, options: Mapping[str, Any], **arguments: Any) -> StreamTrainer:
    """Train a run on a source until the source is idle, and return the stream trainer."""
    arguments.setdefault("open_publisher", open_publishing)
    trainer = StreamTrainer(source, run, Topology.single(), stream_config(options), **arguments)
    trainer.follow()
    return trainer


def without_times(card: DatasetCard) -> list[Any]:
    """Return the generations of a dataset without their times of creation."""
    return [(g.number, g.digest, g.events, g.stream.get("position")) for g in card.generations]


def stream_events(number: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return events of old and new users and items, later than the tiny dataset; some of them arrive late."""
    draw = random.Random(seed)
    events = []
    for index in range(number):
        late = draw.randrange(0, 40_000) if draw.random() < 0.2 else 0
        user = draw.randrange(NUM_USERS + number // 40)
        item = 1 + draw.randrange(NUM_ITEMS + number // 20)
        time_ms = START_MS + 9 * SPAN_MS + index * 1000 - late
        bits = {name: draw.randrange(2) for name in ("click", "like", "long_view")}
        events.append({"user": f"{user}", "item": f"{item}", "time_ms": time_ms, **bits})
    return events


def drop_files(folder: Path, events: Sequence[Mapping[str, Any]], events_per_file: int) -> None:
    """Write events as files of JSON lines, each by an atomic rename."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, start in enumerate(range(0, len(events), events_per_file)):
        lines = [json.dumps(event) for event in events[start : start + events_per_file]]
        path = folder / f"part-{number:05d}.jsonl"
        path.with_name(f".{path.name}").write_text("\n".join(lines) + "\n")
        path.with_name(f".{path.name}").rename(path)


@contextmanager
def source_of(
    kind: str, folder: Path, events: Sequence[Mapping[str, Any]], *, events_per_file: int = 70
) -> Iterator[str]:
    """Yield the address of a folder of files, or of a topic whose brokers run in this process."""
    if kind == "folder":
        drop_files(folder / "events", events, events_per_file)
        yield str(folder / "events")
    else:
        with topic(events) as address:
            yield address


@contextmanager
def topic(events: Sequence[Mapping[str, Any]], partitions: int = 3) -> Iterator[str]:
    """Yield the address of a topic with these events, in mock brokers of the client library."""
    from confluent_kafka import Producer

    settings = {"test.mock.num.brokers": 1, "topic.metadata.refresh.interval.ms": 200}
    producer = Producer({**settings, "linger.ms": 0})
    brokers = producer.list_topics(timeout=10).brokers
    name = "events"
    producer.list_topics(name, timeout=10)  # the mock creates a topic of four partitions when its name is requested
    for index, event in enumerate(events):
        producer.produce(name, json.dumps(event).encode(), partition=index % partitions)
    assert producer.flush(20) == 0
    yield f"kafka://{','.join(f'{b.host}:{b.port}' for b in brokers.values())}/{name}"
    del producer


def copy_run(run: Path, data: Path, target: Path) -> Path:
    """Copy a run and its dataset below `target`, and return the folder of the copied run."""
    shutil.copytree(run, target / "run")
    shutil.copytree(data, target / "data")
    config = json.loads((target / "run" / "config.json").read_text())
    config["data"]["folder"] = str(target / "data")
    (target / "run" / "config.json").write_text(json.dumps(config))
    return target / "run"


def stream_command(source: str, run: Path, options: Mapping[str, object]) -> list[str]:
    """Return the arguments of a `nestrec train-stream` command."""
    arguments = [f"--{name}={value}" for name, value in {**COLUMNS, **options}.items()]
    return [sys.executable, "-m", "nestrec", "train-stream", source, "--run", str(run), *arguments]


def stream_config(options: Mapping[str, object]) -> StreamConfig:
    """Return the config of `nestrec train-stream` with these options."""
    return apply_overrides(StreamConfig(), {name: str(value) for name, value in {**COLUMNS, **options}.items()})
