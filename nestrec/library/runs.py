"""Runs for Python users: train a recipe, measure a run.

    run = nestrec.train("demo", {"training.epochs": 2})
    print(run.evaluation.score, run.evaluation.metrics["model"])

Under torchrun every rank makes the same call, and all of them share the work. Process groups that a call makes are gone
after it, also where it failed; a default group that the caller has made before is used and stays.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch

from nestrec.base.devices import chosen_device
from nestrec.base.errors import UserError, did_you_mean
from nestrec.base.overriding import override_texts
from nestrec.base.paths import given_path
from nestrec.data.samples.split import Part
from nestrec.distributed import Topology
from nestrec.distributed.options import RanksConfig
from nestrec.library.configured import configured
from nestrec.tasks.task import Evaluation
from nestrec.training.config import RunConfig
from nestrec.training.following import StreamFollower, stream_config
from nestrec.training.listener import Listener
from nestrec.training.run_folder import RunFolder
from nestrec.training.trainer import Trainer
from nestrec.training.windows import WindowHook

if TYPE_CHECKING:
    from nestrec.library.loaded import Recommender


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A trained run."""

    folder: Path
    """config, metrics, evaluations and checkpoints; `nestrec report` makes a page of it"""
    steps: int
    """of which the weights with the best validation score were made"""
    evaluation: Evaluation | None
    """metrics of the best weights on the test part, with those of baselines; none if nothing is held out to test on, or
    if the run only trains (training.train_only)"""

    def load(self) -> "Recommender":
        """The best weights, ready to recommend."""
        from nestrec.library.loaded import load

        return load(self.folder)


def train(
    recipe: str | Path | RunConfig,
    overrides: Mapping[str, Any] | None = None,
    *,
    output: Path | str | None = None,
    listener: Listener | None = None,
    start_from: Run | Path | str | None = None,
    window_hooks: Sequence[WindowHook] = (),
) -> Run:
    """Train a recipe, then measure its best epoch on the test part.

    recipe: a recipe's name (`nestrec recipes` lists them), a config.json of a run, or a config. overrides: dotted names
    to values (`{"training.epochs": 2}`, or `{"training": {"epochs": 2}}`; `nestrec options train RECIPE` lists them). A
    mapping with a `kind`, such as an encoder, stands for the whole of it. output: the run folder, runs/NAME
    where not given; on a folder with checkpoints the run goes on from the last one. listener: hears of the progress.
    start_from: a run whose weights, tables and optimiser state this one begins with, on the same data or a later
    generation of it (`nestrec append`). window_hooks: called after each window of time (batch.order chronological).
    Told to stop by SIGTERM or SIGINT, it saves and raises `nestrec.training.stopping.Interrupted`.
    """
    cfg = configured(recipe, overrides)
    folder = Path("runs") / cfg.name if output is None else given_path(output, "output")
    _check_hearers(listener, window_hooks)
    begun = None if start_from is None else folder_of(start_from)
    with contextlib.ExitStack() as held:
        topology = held.enter_context(_ranks_of(cfg, cfg.ranks))
        made = Trainer(cfg, folder, topology, listener, start_from=begun, window_hooks=window_hooks)
        trainer = held.enter_context(contextlib.closing(made))
        trainer.train()
        evaluation = trainer.evaluate("test") if trainer.ends_with_test else None
        return Run(folder=folder, steps=trainer.state.step, evaluation=evaluation)


def evaluate(run: Run | Path | str, part: Part = "test", *, best: bool = True) -> Evaluation:
    """Measure a run on held-out data, beside its baselines; that of the best weights is kept in RUN/eval.

    run: what `train` gave, or its folder. best: the weights of the best validation score, else the last ones.
    """
    if part not in get_args(Part):
        remedy = did_you_mean(str(part), get_args(Part))
        raise UserError("is no part of the data", field="part", value=part, remedy=remedy)
    folder = folder_of(run)
    cfg = RunFolder(folder).config()
    with contextlib.ExitStack() as held:
        topology = held.enter_context(_ranks_of(cfg, RanksConfig()))  # to read tables, any number will do
        with RunFolder(folder).naming_config():
            trainer = held.enter_context(contextlib.closing(Trainer(cfg, folder, topology)))
        return trainer.evaluate(part) if best else trainer.measure(part, best=False)


def follow(
    source: Path | str,
    run: Run | Path | str,
    overrides: Mapping[str, Any] | None = None,
    *,
    listener: Listener | None = None,
    window_hooks: Sequence[WindowHook] = (),
) -> Run:
    """Go on training a run with what a source brings (a folder, kafka://BROKERS/TOPIC), window by window.

    overrides: dotted names to values (`{"window.events": 1000}`; `nestrec options follow` lists them). It returns when
    the source has been idle for `idle_s`, which by default is never; told to stop, it saves and raises `Interrupted`.
    """
    folder = folder_of(run)
    given_path(source, "source")  # an address is text, too, and would not survive as a path
    _check_hearers(listener, window_hooks)
    cfg = RunFolder(folder).config()
    options = stream_config(Path(cfg.data.folder), override_texts(overrides))
    with contextlib.ExitStack() as held:
        topology = held.enter_context(_ranks_of(cfg, cfg.ranks))
        follower = StreamFollower(
            str(source), folder, topology, options, cfg=cfg, listener=listener, window_hooks=window_hooks
        )
        held.enter_context(contextlib.closing(follower.trainer))
        state = follower.follow()
        if listener is not None and follower.untrained:
            listener.noted(follower.untrained)
        return Run(folder=folder, steps=state.step, evaluation=None)


def topology_of(cfg: RunConfig, ranks: RanksConfig) -> Topology:
    """Returns the ranks that torchrun has started, or this process alone, on the config's device and threads."""
    if cfg.training.num_threads is not None:
        torch.set_num_threads(cfg.training.num_threads)
    return Topology.from_environment(chosen_device(cfg.training.device), ranks)


@contextlib.contextmanager
def _ranks_of(cfg: RunConfig, ranks: RanksConfig) -> Iterator[Topology]:
    """`topology_of`, for one call."""
    threads = torch.get_num_threads()
    try:
        with Topology.lent(lambda: topology_of(cfg, ranks)) as topology:
            yield topology
    finally:
        torch.set_num_threads(threads)


def _check_hearers(listener: Any, hooks: Any) -> None:
    """Before anything is trained that they would hear of."""
    if listener is not None and not isinstance(listener, Listener):
        remedy = "give an instance of a class of yours under nestrec.training.listener.Listener"
        raise UserError("is no listener", field="listener", value=listener, remedy=remedy)
    if not isinstance(hooks, Sequence) or not all(map(callable, hooks)):
        remedy = "give a list of functions of a nestrec.training.windows.WindowEnd"
        raise UserError("is no list of functions", field="window_hooks", value=hooks, remedy=remedy)


def folder_of(run: Any) -> Path:
    """Of what a call takes for a run."""
    if not isinstance(run, Run | Path | str):
        remedy = "give what nestrec.train gave, or a folder that it wrote"
        raise UserError("is no run", field="run", value=run, remedy=remedy)
    return run.folder if isinstance(run, Run) else Path(run)
