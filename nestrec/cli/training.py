"""What the commands show on a terminal while they train and measure."""

import contextlib
import sys
from pathlib import Path

from rich.console import Console

from nestrec.base import exit_codes
from nestrec.base.config import with_overrides
from nestrec.base.moments import iso_moment
from nestrec.data.card import Card
from nestrec.data.dataset import Dataset
from nestrec.data.samples.split import Part
from nestrec.distributed.options import RanksConfig
from nestrec.library.runs import topology_of
from nestrec.report import LiveProgress, evaluation_table, progress_for
from nestrec.report.description import describe
from nestrec.report.evaluations import slice_rows, verdict_on
from nestrec.report.run_folder import best_evaluation, load_run
from nestrec.report.tables import print_rows
from nestrec.tasks.task import Evaluation
from nestrec.training.config import RunConfig
from nestrec.training.following import StreamConfig, StreamFollower
from nestrec.training.listener import Listener, Listeners
from nestrec.training.run_folder import RunFolder
from nestrec.training.stopping import Interrupted
from nestrec.training.trainer import Trainer


def train_run(cfg: RunConfig, folder: Path, start_from: Path | None = None) -> None:
    """Train, measure the best epoch on the test part, and print it beside its baselines."""
    topology = topology_of(cfg, cfg.ranks)
    if topology.is_first:
        for option, why in cfg.reasons.items():
            print(f"chose {option} = {why}")
    with contextlib.ExitStack() as shown:
        listeners: list[Listener] = []
        if topology.is_first:
            from nestrec.report.tensorboard import TensorBoardWriter  # a quarter of a second, which other ranks spare

            listeners.append(shown.enter_context(LiveProgress(num_epochs=cfg.training.epochs)))
            listeners.append(shown.enter_context(TensorBoardWriter(folder / "tensorboard")))
        trainer = Trainer(cfg, folder, topology, Listeners(listeners), start_from=start_from)
        try:
            trainer.train()
        except Interrupted:
            print(f"stopped at step {trainer.state.step}; the same command goes on from there", file=sys.stderr)
            sys.exit(exit_codes.INTERRUPTED)
    if topology.is_first:
        _warn_of_baselines(folder)
    with contextlib.closing(trainer):
        evaluation = trainer.evaluate("test") if trainer.session.task.num_held_out("test") else None
    if evaluation is None:
        if topology.is_first:
            print(f"nothing is held out to test on; run folder: {folder}")
    elif topology.is_first:
        name = f"{folder.resolve().name} (recipe {cfg.name})"
        _show(evaluation, f"{name}: test part, best validation epoch, 95% intervals")
        print(f"run folder: {folder}")


def _warn_of_baselines(folder: Path) -> None:
    """Say it loudly where the best validation of a run is behind a system without a model."""
    best = best_evaluation(load_run(folder))
    if best is None or (verdict := verdict_on(best["metrics"], best["headline"])) is None or verdict.outcome == "wins":
        return
    print(f"on validation: {verdict.sentence}", file=sys.stderr)
    if verdict.outcome == "loses":
        print("serve the baseline, or try other sizes and rates: nestrec tune, nestrec train auto", file=sys.stderr)


def follow_run(source: str, folder: Path, overrides: dict[str, str]) -> None:
    """Train on what a source brings until it ends or a signal comes. overrides: `run.` begins those of the run."""
    of_run = {name.removeprefix("run."): text for name, text in overrides.items() if name.startswith("run.")}
    options = with_overrides(StreamConfig(), {n: text for n, text in overrides.items() if not n.startswith("run.")})
    cfg = with_overrides(RunFolder(folder).config(), of_run)
    topology = topology_of(cfg, cfg.ranks)
    with contextlib.ExitStack() as shown:
        listeners: list[Listener] = []
        if topology.is_first:
            from nestrec.report.tensorboard import TensorBoardWriter

            listeners.append(shown.enter_context(LiveProgress()))
            listeners.append(shown.enter_context(TensorBoardWriter(folder / "tensorboard")))
        follower = StreamFollower(source, folder, topology, options, cfg=cfg, listener=Listeners(listeners))
        try:
            follower.follow()
        except Interrupted:
            state = follower.trainer.state
            print(f"stopped at step {state.step}; the same command goes on from there", file=sys.stderr)
            sys.exit(exit_codes.INTERRUPTED)
    if topology.is_first:
        state = follower.trainer.state
        print(f"{state.windows_done} windows, step {state.step}, generation {state.generation}; run folder: {folder}")


def evaluate_run(folder: Path, part: Part, *, best: bool) -> None:
    """Measure a run and print it; the result of its best weights is also written into its folder, as by `train`."""
    cfg = RunFolder(folder).config()
    topology = topology_of(cfg, RanksConfig())  # to read tables, one group of any number of ranks will do
    with progress_for(f"measure {folder}"), contextlib.closing(Trainer(cfg, folder, topology)) as trainer:
        evaluation = trainer.evaluate(part) if best else trainer.measure(part, best=False)
    if topology.is_first:
        weights = "best validation epoch" if best else "last weights"
        name = f"{folder.resolve().name} (recipe {cfg.name})"
        _show(evaluation, f"{name}: {part} part, {weights} (step {trainer.state.step}), 95% intervals")


def show_card(card: Card, folder: Path) -> None:
    counts = card.counts
    kept = f"{counts.users:,} users, {counts.items:,} items, {counts.events:,} events"
    print(f"{folder}: {kept} of {counts.rows_read:,} rows read")
    if counts.duplicates_dropped:
        print(f"exact duplicates: {counts.duplicates_dropped:,} dropped (--duplicates keep keeps them)")
    if counts.duplicates_kept:
        print(f"exact duplicates: {counts.duplicates_kept:,} kept (--duplicates drop drops them)")
    for name, number in counts.filtered.items():
        print(f"removed by a filter: {number:,} events, {name}")
    for whose, features in (
        ("events", card.event_features),
        ("items", card.item_features),
        ("users", card.user_features),
    ):
        if features:
            print(f"features of {whose}: {', '.join(f'{feature.name} ({feature.kind})' for feature in features)}")
    for reason, number in counts.quarantined.items():
        print(f"quarantined: {number:,} rows, {reason}; see {folder / 'quarantine.csv'}")
    if card.kind == "sequences":
        lengths = card.lengths
        spread = f"median {lengths.p50:.0f}, 99% {lengths.p99:.0f}, longest {lengths.max:,}"
        print(f"events a user: mean {lengths.mean:.1f}, {spread}")


def show_dataset(folder: Path) -> None:
    """Print the card of a dataset, its features and what looks like a leak."""
    dataset = Dataset.open(folder)
    show_card(dataset.card, folder)
    if dataset.card.kind != "sequences":
        return
    found = describe(dataset)
    if dataset.card.has_timestamps:
        print(f"features and actions as {found.num_events:,} of {dataset.card.counts.events:,} events have them")
    for name, share in found.actions.items():
        print(f"action {name}: {share:.2%} of events")
    print_rows([facts.row() for facts in found.features])
    if dataset.card.fit.events:
        until = f" before {iso_moment(dataset.card.fit.until_ms)}" if dataset.card.fit.until_ms else ""
        print(f"transforms were learnt from {dataset.card.fit.events:,} events{until}")
    for feature in dataset.card.features:
        if feature.known == "after":
            print(f"{feature.column} is known only after its event: no model reads it of the event that it predicts")
    for warning in found.warnings:
        print(f"WARNING: {warning}")


def _show(evaluation: Evaluation, title: str) -> None:
    plain = evaluation.to_plain()
    Console().print(evaluation_table(plain, title=title))
    if rows := slice_rows(plain):
        print_rows(rows, title="by slices")
    if (verdict := verdict_on(plain["metrics"], plain["headline"])) is not None:
        print(verdict.sentence)
    for note in evaluation.notes:
        print(f"note: {note}")
