"""What Python users call: train, evaluate, load. `import nestrec` hands it on, and the commands are built on it.

The configuration of a run, from what a user names: a recipe, a config.json, or a config of their own.

Runs for Python users: train a recipe, measure a run.

    run = nestrec.train("demo", {"training.epochs": 2})
    print(run.evaluation.score, run.evaluation.metrics["model"])

Under torchrun every rank makes the same call, and all of them share the work. Process groups that a call makes are gone
after it, also where it failed; a default group that the caller has made before is used and stays.

A trained run for servers: as a folder, or as the newest version at an address that they follow.

    run = nestrec.train("demo", output="runs/python")
    manifest = nestrec.export(run, "models/python", {"tables": "int8"})
    nestrec.publish(run, "published/python")

Under torchrun every rank makes the same call.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch

from nestrec.base.config_overrides import override_texts, with_overrides
from nestrec.base.config_values import from_plain
from nestrec.base.cuda import chosen_device
from nestrec.base.errors import UserError, did_you_mean, require
from nestrec.base.files import given_path
from nestrec.data.dataset import Dataset
from nestrec.data.samples.split import Part
from nestrec.distributed import Topology
from nestrec.distributed.topology import ParallelConfig
from nestrec.exporters.servable_writer import ExportConfig, export_run
from nestrec.exporters.version_publisher import PublishRunConfig, open_publishing, publish_run
from nestrec.serving.model.servable_spec import ServableManifest
from nestrec.serving.versions.version_manifest import VersionManifest
from nestrec.serving.versions.version_store import VersionStep
from nestrec.tasks.task import Evaluation
from nestrec.training.callbacks import TrainingCallback
from nestrec.training.recipes import auto_recipe
from nestrec.training.recipes import recipe as named_recipe
from nestrec.training.run_config import RunConfig
from nestrec.training.run_folder import RunFolder
from nestrec.training.stream_trainer import StreamTrainer, stream_config
from nestrec.training.trainer import Trainer
from nestrec.training.training_session import WindowHook

if TYPE_CHECKING:
    from nestrec.inference.recommender import Recommender


def configured(recipe: str | Path | RunConfig, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """A named recipe, the config.json of an earlier run, or a config, with dotted overrides.

    Overrides are values, or text as on the command line. A recipe may make the synthetic logs it names; in a folder
    that the user names, a mistyped name would get them too.
    """
    texts = override_texts(overrides)
    if recipe == auto_recipe.NAME:
        return _automatic(texts)
    base = recipe if isinstance(recipe, RunConfig) else _named(str(recipe))
    own_folder = {"data.synthetic": "none"} if "data.folder" in texts else {}
    return _overridden(base, {**own_folder, **texts})


def _overridden(base: RunConfig, texts: dict[str, str]) -> RunConfig:
    """Returns the config with overrides; what is given loses the reason for which it was chosen."""
    reasons = {name: why for name, why in base.reasons.items() if name not in texts}
    return replace(with_overrides(base, texts), reasons=reasons)


def _automatic(texts: dict[str, str]) -> RunConfig:
    """The recipe that a dataset asks for; options that are given win, and lose the reason of what was chosen."""
    if "data.folder" not in texts:
        remedy = "name the dataset that `nestrec prepare` wrote: --data.folder data/mine"
        raise UserError("reads the card of a dataset", option="RECIPE", value=auto_recipe.NAME, remedy=remedy)
    given = dict(texts)
    kind = given.pop("task.kind", None)
    if kind is not None and kind not in get_args(auto_recipe.TaskKind):
        remedy = did_you_mean(kind, get_args(auto_recipe.TaskKind))
        raise UserError("is no task that it knows", option="task.kind", value=kind, remedy=remedy)
    has_own_split = any(name.startswith(("task.split.", "task.valid_share", "task.test_share")) for name in given)
    dataset = Dataset.open(texts["data.folder"])
    base = auto_recipe.auto(dataset, kind, has_own_split=has_own_split)  # type: ignore[arg-type]
    return _overridden(base, given)


def _named(name: str) -> RunConfig:
    remedy = f"to go on with it: nestrec train {name}/config.json --output {name}"
    require(not Path(name, "config.json").exists(), "is a run, not a recipe", option="RECIPE", value=name, remedy=remedy)
    return _saved_config(Path(name)) if name.endswith(".json") else named_recipe(name)


def _saved_config(file: Path) -> RunConfig:
    try:
        plain = json.loads(file.read_text())
        if not isinstance(plain, dict):
            raise ValueError("it holds no named fields")
        return from_plain(RunConfig, plain)
    except (OSError, ValueError, UserError) as error:
        remedy = "name a config.json that `nestrec train` wrote, or a recipe (see `nestrec recipes`)"
        raise UserError(f"cannot be read: {error}", option="RECIPE", value=str(file), remedy=remedy) from error


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

    def __fspath__(self) -> str:
        """Returns the folder, so that a run can be given wherever its folder can."""
        return os.fspath(self.folder)

    def load(self) -> "Recommender":
        """The best weights, ready to recommend."""
        from nestrec.inference.recommender import load

        return load(self)


def train(
    recipe: str | Path | RunConfig,
    overrides: Mapping[str, Any] | None = None,
    *,
    output: Path | str | None = None,
    listener: TrainingCallback | None = None,
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
    Told to stop by SIGTERM or SIGINT, it saves and raises `nestrec.training.run_checkpointer.RunInterruptedError`.
    """
    cfg = configured(recipe, overrides)
    folder = Path("runs") / cfg.name if output is None else given_path(output, "output")
    _check_hearers(listener, window_hooks)
    begun = None if start_from is None else folder_of(start_from)
    with contextlib.ExitStack() as held:
        topology = held.enter_context(_ranks_of(cfg, cfg.ranks))
        made = Trainer(
            cfg,
            folder,
            topology,
            listener,
            start_from=begun,
            window_hooks=window_hooks,
            open_publishing=open_publishing,
        )
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
        raise UserError("is no part of the data", option="part", value=part, remedy=remedy)
    folder = folder_of(run)
    cfg = RunFolder(folder).config()
    with contextlib.ExitStack() as held:
        topology = held.enter_context(_ranks_of(cfg, ParallelConfig()))  # to read tables, any number will do
        with RunFolder(folder).naming_config():
            trainer = held.enter_context(contextlib.closing(Trainer(cfg, folder, topology)))
        return trainer.evaluate(part) if best else trainer.measure(part, best=False)


def follow(
    source: Path | str,
    run: Run | Path | str,
    overrides: Mapping[str, Any] | None = None,
    *,
    listener: TrainingCallback | None = None,
    window_hooks: Sequence[WindowHook] = (),
) -> Run:
    """Go on training a run with what a source brings (a folder, kafka://BROKERS/TOPIC), window by window.

    overrides: dotted names to values (`{"window.events": 1000}`; `nestrec options follow` lists them). It returns when
    the source has been idle for `idle_s`, which by default is never; told to stop, it saves and raises
    `RunInterruptedError`."""
    folder = folder_of(run)
    given_path(source, "source")  # an address is text, too, and would not survive as a path
    _check_hearers(listener, window_hooks)
    cfg = RunFolder(folder).config()
    options = stream_config(Path(cfg.data.folder), override_texts(overrides))
    with contextlib.ExitStack() as held:
        topology = held.enter_context(_ranks_of(cfg, cfg.ranks))
        follower = StreamTrainer(
            str(source),
            folder,
            topology,
            options,
            cfg=cfg,
            listener=listener,
            window_hooks=window_hooks,
            open_publishing=open_publishing,
        )
        held.enter_context(contextlib.closing(follower.trainer))
        state = follower.follow()
        if listener is not None and follower.untrained:
            listener.noted(follower.untrained)
        return Run(folder=folder, steps=state.step, evaluation=None)


def topology_of(cfg: RunConfig, ranks: ParallelConfig) -> Topology:
    """Returns the ranks that torchrun has started, or this process alone, on the config's device and threads."""
    if cfg.training.num_threads is not None:
        torch.set_num_threads(cfg.training.num_threads)
    return Topology.from_environment(chosen_device(cfg.training.device), ranks)


@contextlib.contextmanager
def _ranks_of(cfg: RunConfig, ranks: ParallelConfig) -> Iterator[Topology]:
    """`topology_of`, for one call."""
    threads = torch.get_num_threads()
    try:
        with Topology.lent(lambda: topology_of(cfg, ranks)) as topology:
            yield topology
    finally:
        torch.set_num_threads(threads)


def _check_hearers(listener: Any, hooks: Any) -> None:
    """Before anything is trained that they would hear of."""
    if listener is not None and not isinstance(listener, TrainingCallback):
        remedy = "give an instance of a class of yours under nestrec.training.callbacks.TrainingCallback"
        raise UserError("is no listener", option="listener", value=listener, remedy=remedy)
    if not isinstance(hooks, Sequence) or not all(map(callable, hooks)):
        remedy = "give a list of functions of a nestrec.training.training_session.WindowEnd"
        raise UserError("is no list of functions", option="window_hooks", value=hooks, remedy=remedy)


def folder_of(run: Any) -> Path:
    """Of what a call takes for a run."""
    remedy = "give what nestrec.train gave, or a folder that it wrote"
    require(isinstance(run, Run | Path | str), "is no run", option="run", value=run, remedy=remedy)
    return run.folder if isinstance(run, Run) else Path(run)


def export(
    run: Run | Path | str, output: Path | str, overrides: Mapping[str, Any] | None = None, *, best: bool = True
) -> ServableManifest:
    """Write a run as a servable folder, which must not exist yet; its manifest, with the version of the model.

    run: what `train` gave, or its folder. overrides: dotted names to values (`{"dtype": "bfloat16"}`; `nestrec options
    export` lists them); what fewer bits cost stands in the manifest. best: the weights of the best validation score,
    else the last ones.
    """
    cfg = with_overrides(ExportConfig(), override_texts(overrides))
    folder = folder_of(run)
    written = given_path(output, "output")
    return export_run(
        folder,
        written,
        best=best,
        defaults=cfg.defaults,
        search=cfg.search,
        dtype=cfg.dtype,
        tables=cfg.tables,
        prefixes=cfg.prefixes,
        device=cfg.device,
    )


def publish(
    run: Run | Path | str, address: Path | str, overrides: Mapping[str, Any] | None = None, *, best: bool = True
) -> VersionManifest:
    """Publish a run that is not under way, in full, for servers that follow the address; the newest version there.

    run: what `train` gave, or its folder. address: a folder, or an address that fsspec knows (s3://..., gs://...).
    overrides: dotted names to values (`{"keep": 10}`; `nestrec options publish` lists them). best: the weights of the
    best validation score, else the last ones.
    """
    return publish_version(run, address, overrides, best=best).manifest


def publish_version(
    run: Run | Path | str, address: Path | str, overrides: Mapping[str, Any] | None = None, *, best: bool = True
) -> VersionStep:
    """Publish a run as `publish` does, and return the version with its name."""
    cfg = with_overrides(PublishRunConfig(), override_texts(overrides))
    folder = folder_of(run)
    given_path(address, "address")  # it is text, too, and would not survive as a path
    return publish_run(folder, str(address), cfg, best=best)
