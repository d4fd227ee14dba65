"""What the commands show on a terminal while they train and measure."""

import contextlib
import sys
from pathlib import Path

from rich.console import Console

from nestrec.base import exit_codes
from nestrec.base.config import with_overrides
from nestrec.data.samples.split import Part
from nestrec.distributed.options import RanksConfig
from nestrec.library.runs import topology_of
from nestrec.report import LiveProgress, evaluation_table, progress_for
from nestrec.report.evaluations import OF_SLICES, slice_rows, verdict_on
from nestrec.report.run_folder import best_evaluation, load_run
from nestrec.report.tables import print_rows
from nestrec.tasks.task import Evaluation
from nestrec.training.config import RunConfig
from nestrec.training.following import StreamFollower, stream_config
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
        _show(evaluation, _title(trainer, "test"))
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
