"""What the commands show on a terminal while they train and measure."""

import contextlib
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from nestrec.base import exit_codes
from nestrec.base.config import with_overrides
from nestrec.data.samples.split import Part
from nestrec.distributed.options import RanksConfig
from nestrec.library.runs import topology_of
from nestrec.report import LiveProgress, evaluation_table, progress_for
from nestrec.report.evaluations import OF_SLICES, slice_rows, verdict_on
from nestrec.report.formats import duration
from nestrec.report.run_folder import best_evaluation, load_run
from nestrec.report.tables import print_rows
from nestrec.tasks.task import Evaluation
from nestrec.training.config import RunConfig
from nestrec.training.following import StreamFollower, stream_config
from nestrec.training.listener import Listener, Listeners
from nestrec.training.recipes.auto import NAME as AUTO
from nestrec.training.run_folder import RunFolder
from nestrec.training.state import TrainState
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
        began_s = time.perf_counter()
        try:
            trainer.train()
        except Interrupted:
            print(f"stopped at step {trainer.state.step}; the same command goes on from there", file=sys.stderr)
            sys.exit(exit_codes.INTERRUPTED)
    trained_s = time.perf_counter() - began_s
    last_step = trainer.state.step
    if topology.is_first:
        _warn_of_baselines(folder, cfg, trainer.state)
    with contextlib.closing(trainer):
        evaluation = trainer.evaluate("test") if trainer.ends_with_test else None
    if not topology.is_first:
        return
    if evaluation is not None:
        _show(evaluation, _title(trainer, "test"))
    elif cfg.training.train_only:
        print(f"trained only; to measure the run: nestrec eval {folder}")
    else:
        print("nothing is held out to test on")
    took = f"{trained_s:.1f} s" if trained_s < 60 else duration(trained_s)
    print(f"trained to step {last_step:,} in {took}; run folder: {folder}")


def _warn_of_baselines(folder: Path, cfg: RunConfig, state: TrainState) -> None:
    """Prints a warning and advice if the best validation of a run is not better than a system without a model."""
    best = best_evaluation(load_run(folder))
    if best is None or (verdict := verdict_on(best["metrics"], best["headline"])) is None or verdict.outcome == "wins":
        return
    print(f"on validation: {verdict.sentence}", file=sys.stderr)
    if verdict.outcome == "loses":
        for line in _advice(folder, cfg, state):
            print(line, file=sys.stderr)


def _advice(folder: Path, cfg: RunConfig, state: TrainState) -> Iterator[str]:
    """What a user can try for a run that is worse than a baseline."""
    if state.best_step == state.step and state.evaluations_since_best == 0:
        epochs = cfg.training.epochs
        longer = f"--training.epochs {2 * epochs}"
        if cfg.training.max_steps is not None:
            longer += f" --training.max_steps {2 * cfg.training.max_steps}"
        yield f"try: the last epoch was the best one, so train longer: the same command with {longer}"
    run = shlex.quote(str(folder))
    data = shlex.quote(cfg.data.folder)
    search = f"nestrec tune {run}/config.json --output {run}-tune --runs 20"
    yield f"try: search other rates, dropouts and layers (pip install 'nestrec[tune]'): {search}"
    if cfg.name != AUTO and cfg.data.synthetic is None:
        automatic = f"nestrec train auto --data.folder {data} --output {run}-auto"
        yield f"try: sizes and loss chosen for this dataset: {automatic}"


def follow_run(source: str, folder: Path, overrides: dict[str, str]) -> None:
    """Train on what a source brings until it ends or a signal comes. overrides: `run.` begins those of the run."""
    of_run = {name.removeprefix("run."): text for name, text in overrides.items() if name.startswith("run.")}
    of_stream = {name: text for name, text in overrides.items() if not name.startswith("run.")}
    cfg = with_overrides(RunFolder(folder).config(), of_run)
    options = stream_config(Path(cfg.data.folder), of_stream)
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
            if follower.untrained:
                print(follower.untrained, file=sys.stderr)
            sys.exit(exit_codes.INTERRUPTED)
    if topology.is_first:
        state = follower.trainer.state
        print(f"{state.windows_done} windows, step {state.step}, generation {state.generation}; run folder: {folder}")
        if follower.untrained:
            print(follower.untrained)


def evaluate_run(folder: Path, part: Part, *, best: bool) -> None:
    """Measure a run and print it; the result of its best weights is also written into its folder, as by `train`."""
    run_folder = RunFolder(folder)
    cfg = run_folder.config()
    topology = topology_of(cfg, RanksConfig())  # to read tables, one group of any number of ranks will do
    with contextlib.ExitStack() as held:
        held.enter_context(progress_for(f"measure {folder}"))
        with run_folder.naming_config():
            trainer = held.enter_context(contextlib.closing(Trainer(cfg, folder, topology)))
        evaluation = trainer.evaluate(part) if best else trainer.measure(part, best=False)
    if topology.is_first:
        _show(evaluation, _title(trainer, part))


def _title(trainer: Trainer, part: Part) -> str:
    """Returns the title of a table of what a trainer has measured, with the weights that were used."""
    name = f"{trainer.folder.path.resolve().name} (recipe {trainer.cfg.name})"
    weights = "best validation epoch" if trainer.has_best else "last weights"
    return f"{name}: {part} part, {weights} (step {trainer.state.step}), 95% intervals"


def _show(evaluation: Evaluation, title: str) -> None:
    plain = evaluation.to_plain()
    Console().print(evaluation_table(plain, title=title))
    if rows := slice_rows(plain):
        print_rows(rows, title=OF_SLICES)
    if (verdict := verdict_on(plain["metrics"], plain["headline"])) is not None:
        print(verdict.sentence)
    for note in evaluation.notes:
        print(f"note: {note}")
