"""Online (continual) training on a stream: each window is appended to the dataset, evaluated, trained on and saved.

The stream is not read while a window is trained on, so a slow trainer slows down reading (backpressure), and memory
holds one window. The events of a window are committed to the dataset together with the source offset before training
(nestrec.data.streaming.ingester), and a checkpoint contains the dataset generation it was trained on. So a killed run
trains on exactly the windows that its last checkpoint does not contain, and then continues reading after them.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from nestrec.base.config import config
from nestrec.base.config_overrides import apply_overrides
from nestrec.base.config_values import Fraction, Positive, from_plain
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
    stream_log_options,
)
from nestrec.data.streaming.stream_source import OnSourceChange
from nestrec.data.streaming.window_policy import WindowRule
from nestrec.distributed import Topology
from nestrec.distributed.collectives import all_gather_json
from nestrec.training.callbacks import TrainingCallback
from nestrec.training.distributed_source import DistributedSource
from nestrec.training.run_checkpointer import RunInterruptedError, RunWeights, StopRequest
from nestrec.training.run_config import RunConfig
from nestrec.training.run_folder import STREAM_START_FILE, RunFolder
from nestrec.training.run_identity import read_run_file
from nestrec.training.state import TrainState
from nestrec.training.trainer import Trainer
from nestrec.training.training_session import WindowHook, run_on_all_ranks, run_on_first_rank


@config
class StreamConfig:
    """Options for online training on a stream."""

    window: WindowRule = field(default_factory=WindowRule)
    """Rule that determines when a window closes."""
    log: LogColumns | None = None
    """Meaning of the fields of an event; None: as when the data of the run was prepared from a log."""
    replay_fraction: ReplayShare = 0.0
    """Fraction of a window's samples that are drawn from older events instead (experience replay)."""
    max_bad_fraction: Fraction = 1.0
    """Maximum fraction of rejected rows in a window; more is an error. Rejected rows are quarantined in any case."""
    on_source_change: OnSourceChange = "error"
    """Action if another source was read into this dataset before. `error`: stop. `moved`: the stream is the same at
    another address, so continue from its offset. `restart`: it is another stream, so read it from the beginning, or
    from its own last offset."""
    items: str | None = None
    """Table with features of new items (a file, a folder, or a quoted glob pattern), read again for each window; its
    columns have the same meaning as those of the table that the data was prepared with."""
    users: str | None = None
    """Table with features of new users, in the same form as `items`."""
    poll_interval_s: Positive = 0.5
    """Time between polls of an idle source, in seconds."""
    stop_after_idle_s: Positive | None = None
    """Idle time after which the run ends, in seconds; None waits forever."""


def stream_config(data: Path, overrides: Mapping[str, str]) -> StreamConfig:
    """Return the stream options: those that the dataset in folder `data` was prepared with, plus overrides."""
    options = DatasetCard.load(data).options
    log = from_plain(LogColumns, options["log"]) if "log" in options else None
    return apply_overrides(StreamConfig(log=log), overrides)


class StreamTrainer:
    """Trains a run on a stream (online training), and resumes from the last checkpoint of the run folder."""

    def __init__(
        self,
        address: str,
        run: Path,
        topology: Topology,
        options: StreamConfig | None = None,
        *,
        cfg: RunConfig | None = None,
        callback: TrainingCallback | None = None,
        window_hooks: Sequence[WindowHook] = (),
        **trainer_options: Any,
    ):
        """Build the trainer of an existing run. Collective.

        Args:
            address: Address of the stream source.
            run: Folder of a run that was trained before.
            topology: Ranks of the run.
            options: Options of the stream.
            cfg: New config of the run; None keeps the current one.
            callback: Notified of the progress of the run.
            window_hooks: Called at the end of each window.
            **trainer_options: Other arguments of `Trainer`, such as `open_publisher`.
        """
        self._options = options or StreamConfig()
        self._topology = topology
        self._run = run
        self._callback = callback or TrainingCallback()
        self._cfg = cfg or RunFolder(run).config()
        self._folder = Path(self._cfg.data.folder)
        last = RunWeights(self._cfg, RunFolder(run), topology, report=self._callback.on_warning).last
        generation = all_gather_json(
            topology.control, run_on_first_rank(topology, lambda: self._trained_generation(last))
        )[0]
        self.trainer = Trainer(
            self._cfg, run, topology, callback, window_hooks=window_hooks, generation=int(generation), **trainer_options
        )
        self._address = address
        self._source: DistributedSource | None = None
        self._stream: StreamIngester | None = None
        self._has_warned_of_items = False

    def follow(self) -> TrainState:
        """Train until the source has been idle for `stop_after_idle_s`. Collective.

        Raises:
            RunInterruptedError: If a signal stopped the run.
        """
        with contextlib.ExitStack() as stack:
            run_on_first_rank(self._topology, lambda: stack.enter_context(self.trainer.folder.locked()))
            run_on_all_ranks(self._topology, self._open_stream)
            first = run_on_first_rank(self._topology, self._start_generation)
            self.trainer.folder.write_stream_start({"from_generation": first, "source": self._address})
            assert self._source is not None
            stack.callback(self._source.close)
            stop = stack.enter_context(StopRequest().handling_signals())
            self.trainer._begin()
            self._follow(stop)
            self.trainer.schedule.close()
            self.trainer._end()
        return self.trainer.state

    @property
    def untrained_message(self) -> str:
        """Message about events that were read but not trained on; empty if there are none. Only set on rank 0."""
        number = 0 if self._stream is None else self._stream.num_pending_rows
        if not number:
            return ""
        rule = self._options.window
        closes = f"{rule.hours} hours" if rule.events is None else f"{rule.events:,} events"
        pronoun = "it is" if number == 1 else "they are"
        return (
            f"{_number_text(number, 'events')} of the stream not trained on, because a window closes after {closes}; "
            f"{pronoun} read again if you run the same command"
        )

    def _follow(self, stop: StopRequest) -> None:
        state = self.trainer.state
        if state.generation is not None and state.position.step > 0:
            self._train(state.generation, {}, stop)
        while True:
            local = run_on_all_ranks(self._topology, lambda: self._await_next(stop))
            window = all_gather_json(self._topology.control, local)[0]
            if window is None:
                return
            if window.get("stopped"):
                raise RunInterruptedError
            self._train(int(window["generation"]), window["times"], stop)

    def _train(self, generation: int, times: dict[str, float], stop: StopRequest) -> None:
        """Train on the events that a dataset generation has added."""
        trainer = self.trainer
        trainer.session = trainer.session.with_dataset(Dataset.open(self._folder, generation=generation))
        window = self._window(trainer.session.dataset)
        trainer.window_arrival_times = times
        trainer.session.task.set_windows([window], None, replay_fraction=self._options.replay_fraction)
        if not len(trainer.session.task.collator.tokens):
            trainer.state = replace(trainer.state, generation=generation)
            trainer.folder.record("event", step=trainer.state.step, text=f"generation {generation} trains nothing")
            return
        trainer.train_window(window, generation, stop)
        trainer.folder.write_card(trainer.session.dataset)
        fail_point("follow.window")

    def _window(self, dataset: Dataset) -> TimeWindow:
        return window_of_events(self.trainer.state.windows_done, *dataset.newest_events())

    def _await_next(self, stop: StopRequest) -> dict[str, Any] | None:
        """Wait for the next window on rank 0, while the other ranks serve its read requests."""
        assert self._source is not None
        with self._source.serving_reads(lambda: stop.is_set):
            return self._next(stop) if self._topology.is_first else None

    def _next(self, stop: StopRequest) -> dict[str, Any] | None:
        """Wait for the next dataset generation to train on; None at the end. Only on rank 0."""
        stream = self._stream
        source = self._source
        assert stream is not None
        assert source is not None
        trained = self.trainer.state.generation
        trained = self._start_generation() if trained is None else trained
        self._card_generation()  # raises if the dataset was rolled back
        before = DatasetCard.load(self._folder)
        if before.generation > trained:
            return {"generation": trained + 1, "times": {}}
        since = time.monotonic()

        def stop_requested() -> bool:
            return stop.is_set or source.is_stop_requested_remotely

        def end_requested() -> bool:
            idle_s = self._options.stop_after_idle_s
            if stop_requested() or (idle_s is not None and time.monotonic() - since >= idle_s):
                return True
            time.sleep(self._options.poll_interval_s if idle_s is None else min(self._options.poll_interval_s, idle_s))
            return False

        try:
            result = stream.next_window(end_requested)
        except StreamConflictError:
            return self._next(stop)
        if result is None:
            return {"stopped": True} if stop_requested() else None
        card, times = result
        lag = stream.lag(card)
        self.trainer.folder.record("lag", step=self.trainer.state.step, generation=card.generation, **lag)
        shown = ", ".join(_number_text(number, unit) for unit, number in lag.items())
        self._warn_of_rejected_rows(before, card)
        self._warn_of_unknown_items(before, card)
        self._callback.on_message(f"generation {card.generation}: {card.counts.events:,} events; waiting: {shown}")
        # Generations that other processes have appended in the meantime are trained on first.
        return {"generation": trained + 1, "times": _plain(times) if card.generation == trained + 1 else {}}

    def _open_stream(self) -> None:
        options = stream_log_options(DatasetCard.load(self._folder), self._options.log, self._options.max_bad_fraction)
        self._source = DistributedSource(open_stream_source(self._address, options), self._topology)
        self._stream = StreamIngester(
            self._source,
            self._address,
            self._folder,
            self._options.window,
            options,
            on_source_change=self._options.on_source_change,
            tables=self._tables(),
            report=self._warn,
        )

    def _tables(self) -> dict[Owner, str]:
        tables: tuple[tuple[Owner, str | None], ...] = (("item", self._options.items), ("user", self._options.users))
        return {owner: file for owner, file in tables if file is not None}

    def _warn_of_unknown_items(self, before: DatasetCard, card: DatasetCard) -> None:
        """Print a warning about new items without features, only once: most windows of a stream have new items."""
        warning = "" if self._has_warned_of_items else items_without_features(self._folder, before, card)
        if warning:
            self._has_warned_of_items = True
            self._warn(f"generation {card.generation}: {warning}")

    def _warn_of_rejected_rows(self, before: DatasetCard, card: DatasetCard) -> None:
        """Print the number of rejected rows of a window, and the file of the quarantine that contains them."""
        reasons = Counter(card.counts.quarantined) - Counter(before.counts.quarantined)
        if reasons:
            shown = ", ".join(f"{reason} {number:,}" for reason, number in reasons.most_common())
            name = f"quarantine/{card.generation:06d}.csv of {self._folder}"
            self._warn(f"generation {card.generation}: {reasons.total():,} rejected rows are in {name} ({shown})")

    def _warn(self, text: str) -> None:
        """Report a warning and record it in the run folder."""
        self.trainer.folder.record("event", step=self.trainer.state.step, text=text)
        self._callback.on_warning(text)

    def _trained_generation(self, last: CheckpointManager) -> int:
        """Return the generation of the newest checkpoint, or the one that online training started from."""
        self._card_generation()  # raises if the ids of the dataset do not match
        state = last.latest_state()
        generation = None if state is None else TrainState.from_plain(state["train"]).generation
        return self._start_generation() if generation is None else generation

    def _start_generation(self) -> int:
        """Return the generation that the run was trained on before online training started."""
        file = self._run / STREAM_START_FILE
        if file.exists():
            return read_run_file(file, lambda plain: int(plain["from_generation"]))
        return self._card_generation()

    def _card_generation(self) -> int:
        """Return the dataset generation of the run's card; raise a UserError if the dataset does not contain it."""
        trained_on, card = DatasetCard.load(self._run), DatasetCard.load(self._folder)
        if trained_on.digest_of_files == card.digest_of_files:
            return card.generation
        generation = card.find_generation(trained_on)
        if generation is None:
            raise UserError(
                "this run was trained on other data",
                option="data.folder",
                value=str(self._folder),
                remedy="set --run.data.folder to the data of the run, restore the generation that it was trained on "
                "(nestrec restore), or train a run on this data first",
            )
        return generation.number


def _plain(times: WindowTimes) -> dict[str, float]:
    return {
        "read_at_s": times.newest_at_s,
        "first_at_s": times.first_at_s,
        "mean_at_s": times.mean_at_s,
        "closed_at_s": times.closed_at_s,
    }


def _number_text(number: float, unit: str) -> str:
    return f"{number:,.0f} {unit.removesuffix('s') if number == 1 else unit}"
