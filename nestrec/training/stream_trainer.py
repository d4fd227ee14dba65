"""A run that follows a stream: each window is appended to its data, predicted, trained on and saved.

Nothing is read while a window trains: a slow trainer slows the reading, and what is in memory is one window. What a
window holds is on the disk before it is trained on, with how far the source was read (nestrec.data.sources.stream); a
checkpoint names the generation that it has come to. So a run that was killed trains on the very windows again that its
last checkpoint has not seen, and goes on reading behind them.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from nestrec.base.config import config
from nestrec.base.config_overrides import with_overrides
from nestrec.base.config_values import Positive, Share, from_plain
from nestrec.base.errors import UserError
from nestrec.base.failpoints import fail_point
from nestrec.checkpoint import CheckpointManager
from nestrec.data.dataset import Dataset
from nestrec.data.dataset_card import DatasetCard, Owner
from nestrec.data.incremental.append import items_without_features
from nestrec.data.prepare.prepare_options import LogColumns
from nestrec.data.samples.time_windows import ReplayShare, TimeWindow, window_of_events
from nestrec.data.streaming.ingester import (
    StreamConflictError,
    StreamIngester,
    WindowTimes,
    open_stream_source,
    options_of,
)
from nestrec.data.streaming.stream_source import ChangedSource
from nestrec.data.streaming.window_policy import WindowRule
from nestrec.distributed import Topology
from nestrec.distributed.collectives import all_gather_json
from nestrec.training.callbacks import TrainingCallback
from nestrec.training.distributed_source import DistributedSource
from nestrec.training.run_checkpointer import RunInterruptedError, RunWeights, StopRequest
from nestrec.training.run_config import RunConfig
from nestrec.training.run_folder import FOLLOWING_FILE, RunFolder
from nestrec.training.run_identity import read_kept
from nestrec.training.state import TrainState
from nestrec.training.trainer import Trainer
from nestrec.training.training_session import WindowHook, on_first, together


@config
class StreamConfig:
    """How a run follows a stream."""

    window: WindowRule = field(default_factory=WindowRule)
    """when a window closes"""
    log: LogColumns | None = None
    """what the fields of an event mean; none: as the data of the run was prepared from a log"""
    replay_share: ReplayShare = 0.0
    """share of the samples of a window that are drawn from older events instead"""
    max_bad_share: Share = 1.0
    """more bad rows in a window than this share is an error; they are set aside in any case"""
    changed_source: ChangedSource = "refuse"
    """what to do where another source was read into this data before. moved: this is the same stream at another place,
    go on where it stood. begin: this is another stream, read it from its beginning, or from where it was left"""
    items: str | None = None
    """a table with features of new items (a file, a folder, or a pattern in quotes), read again for each window; its
    columns mean what those of the table meant that the data was prepared with"""
    users: str | None = None
    """a table with features of new users, likewise"""
    poll_s: Positive = 0.5
    """how long to wait where there is nothing to read"""
    idle_s: Positive | None = None
    """end when nothing was there to read for so long; none waits for ever"""


def stream_config(data: Path, overrides: Mapping[str, str]) -> StreamConfig:
    """Options as text on top of what the data was prepared with. data: its folder."""
    options = DatasetCard.load(data).options
    log = from_plain(LogColumns, options["log"]) if "log" in options else None
    return with_overrides(StreamConfig(log=log), overrides)


class StreamTrainer:
    """Trains a run on what a source brings; started again on its folder, goes on where it stood."""

    def __init__(
        self,
        address: str,
        run: Path,
        topology: Topology,
        options: StreamConfig | None = None,
        *,
        cfg: RunConfig | None = None,
        listener: TrainingCallback | None = None,
        window_hooks: Sequence[WindowHook] = (),
        **trainer_options: Any,
    ):
        """address: of the source. run: a folder that has been trained into. cfg: its config, where it is to change.
        trainer_options: other arguments of `Trainer`, such as `open_publishing`."""
        self._options = options or StreamConfig()
        self._topology = topology
        self._run = run
        self._listener = listener or TrainingCallback()
        self._cfg = cfg or RunFolder(run).config()
        self._folder = Path(self._cfg.data.folder)
        last = RunWeights(self._cfg, RunFolder(run), topology, report=self._listener.warned).last
        generation = all_gather_json(topology.control, on_first(topology, lambda: self._reached(last)))[0]
        self.trainer = Trainer(
            self._cfg, run, topology, listener, window_hooks=window_hooks, generation=int(generation), **trainer_options
        )
        self._address = address
        self._source: DistributedSource | None = None
        self._stream: StreamIngester | None = None
        self._has_warned_of_items = False

    def follow(self) -> TrainState:
        """Until the source has been idle for as long as the options say, or until told to stop
        (`RunInterruptedError`)."""
        with contextlib.ExitStack() as held:
            on_first(self._topology, lambda: held.enter_context(self.trainer.folder.kept_to_itself()))
            together(self._topology, self._open_stream)
            first = on_first(self._topology, self._first)
            self.trainer.folder.write_following({"from_generation": first, "source": self._address})
            assert self._source is not None
            held.callback(self._source.close)
            stop = held.enter_context(StopRequest().listening())
            self.trainer._begin()
            self._follow(stop)
            self.trainer.schedule.close()
            self.trainer._end()
        return self.trainer.state

    @property
    def untrained(self) -> str:
        """What was read and not trained on, for people; empty if that is nothing. Known to the first rank."""
        number = 0 if self._stream is None else self._stream.num_open
        if not number:
            return ""
        rule = self._options.window
        closes = f"{rule.hours} hours" if rule.events is None else f"{rule.events:,} events"
        them = "it is" if number == 1 else "they are"
        return (
            f"{_counted(number, 'events')} of the stream not trained on: a window closes after {closes}; {them} read "
            "again by the same command"
        )

    def _follow(self, stop: StopRequest) -> None:
        state = self.trainer.state
        if state.generation is not None and state.position.step > 0:
            self._train(state.generation, {}, stop)
        while True:
            told = together(self._topology, lambda: self._awaited(stop))
            found = all_gather_json(self._topology.control, told)[0]
            if found is None:
                return
            if found.get("stopped"):
                raise RunInterruptedError
            self._train(int(found["generation"]), found["times"], stop)

    def _train(self, generation: int, times: dict[str, float], stop: StopRequest) -> None:
        """The events that a generation has added."""
        trainer = self.trainer
        trainer.session = trainer.session.on(Dataset.open(self._folder, generation=generation))
        window = self._window(trainer.session.dataset)
        trainer.window_times = times
        trainer.session.task.take_windows([window], None, replay_share=self._options.replay_share)
        if not len(trainer.session.task.assembler.tokens):
            trainer.state = replace(trainer.state, generation=generation)
            trainer.folder.record("event", step=trainer.state.step, text=f"generation {generation} trains nothing")
            return
        trainer.train_window(window, generation, stop)
        trainer.folder.write_card(trainer.session.dataset)
        fail_point("follow.window")

    def _window(self, dataset: Dataset) -> TimeWindow:
        return window_of_events(self.trainer.state.windows_done, *dataset.newest_events())

    def _awaited(self, stop: StopRequest) -> dict[str, Any] | None:
        """What comes next, on the first rank; the others read their share of it meanwhile."""
        assert self._source is not None
        with self._source.helping(lambda: stop.is_set):
            return self._next(stop) if self._topology.is_first else None

    def _next(self, stop: StopRequest) -> dict[str, Any] | None:
        """The generation to train on next, waited for; none at the end. On the first rank alone."""
        stream = self._stream
        source = self._source
        assert stream is not None
        assert source is not None
        reached = self.trainer.state.generation
        reached = self._first() if reached is None else reached
        self._last_on()  # raises where the data was put back meanwhile
        before = DatasetCard.load(self._folder)
        if before.generation > reached:
            return {"generation": reached + 1, "times": {}}
        since = time.monotonic()

        def wants_stop() -> bool:
            return stop.is_set or source.others_want_stop

        def wants_end() -> bool:
            idle_s = self._options.idle_s
            if wants_stop() or (idle_s is not None and time.monotonic() - since >= idle_s):
                return True
            time.sleep(self._options.poll_s if idle_s is None else min(self._options.poll_s, idle_s))
            return False

        try:
            found = stream.next_window(wants_end)
        except StreamConflictError:
            return self._next(stop)
        if found is None:
            return {"stopped": True} if wants_stop() else None
        card, times = found
        lag = stream.lag(card)
        self.trainer.folder.record("lag", step=self.trainer.state.step, generation=card.generation, **lag)
        shown = ", ".join(_counted(number, unit) for unit, number in lag.items())
        self._tell_of_bad(before, card)
        self._tell_of_unknown_items(before, card)
        self._listener.noted(f"generation {card.generation}: {card.counts.events:,} events; waiting: {shown}")
        # What others have appended meanwhile comes before it.
        return {"generation": reached + 1, "times": _plain(times) if card.generation == reached + 1 else {}}

    def _open_stream(self) -> None:
        options = options_of(DatasetCard.load(self._folder), self._options.log, self._options.max_bad_share)
        self._source = DistributedSource(open_stream_source(self._address, options), self._topology)
        self._stream = StreamIngester(
            self._source,
            self._address,
            self._folder,
            self._options.window,
            options,
            changed_source=self._options.changed_source,
            tables=self._tables(),
            tell=self._told,
        )

    def _tables(self) -> dict[Owner, str]:
        given: tuple[tuple[Owner, str | None], ...] = (("item", self._options.items), ("user", self._options.users))
        return {owner: file for owner, file in given if file is not None}

    def _tell_of_unknown_items(self, before: DatasetCard, card: DatasetCard) -> None:
        """Once: most windows of a stream have new items."""
        warning = "" if self._has_warned_of_items else items_without_features(self._folder, before, card)
        if warning:
            self._has_warned_of_items = True
            self._told(f"generation {card.generation}: {warning}")

    def _tell_of_bad(self, before: DatasetCard, card: DatasetCard) -> None:
        """How many rows of a window were set aside, and where they lie."""
        reasons = Counter(card.counts.quarantined) - Counter(before.counts.quarantined)
        if reasons:
            shown = ", ".join(f"{reason} {number:,}" for reason, number in reasons.most_common())
            name = f"quarantine/{card.generation:06d}.csv of {self._folder}"
            self._told(f"generation {card.generation}: {reasons.total():,} bad rows are set aside in {name} ({shown})")

    def _told(self, text: str) -> None:
        """To people, and into the run's folder."""
        self.trainer.folder.record("event", step=self.trainer.state.step, text=text)
        self._listener.warned(text)

    def _reached(self, last: CheckpointManager) -> int:
        """The generation that the run has come to, by its newest checkpoint, or else where it began to follow."""
        self._last_on()  # of which the ids mean what they meant
        state = last.newest_state()
        generation = None if state is None else TrainState.from_plain(state["train"]).generation
        return self._first() if generation is None else generation

    def _first(self) -> int:
        """The generation that the run was trained on before it began to follow."""
        file = self._run / FOLLOWING_FILE
        if file.exists():
            return read_kept(file, lambda plain: int(plain["from_generation"]))
        return self._last_on()

    def _last_on(self) -> int:
        """The generation of the data that the run was on last; a UserError where it has never been one."""
        trained_on, card = DatasetCard.load(self._run), DatasetCard.load(self._folder)
        if trained_on.digest_of_files == card.digest_of_files:
            return card.generation
        found = card.generation_of(trained_on)
        if found is None:
            raise UserError(
                "is not the data that this run was trained on",
                option="data.folder",
                value=str(self._folder),
                remedy="name it with --run.data.folder, put the generation that it was trained on in force again "
                "(nestrec restore), or train a run on this data first",
            )
        return found.number


def _plain(times: WindowTimes) -> dict[str, float]:
    return {
        "read_at_s": times.newest_at_s,
        "first_at_s": times.first_at_s,
        "mean_at_s": times.mean_at_s,
        "closed_at_s": times.closed_at_s,
    }


def _counted(number: float, unit: str) -> str:
    return f"{number:,.0f} {unit.removesuffix('s') if number == 1 else unit}"
