"""Training and evaluation from Python: `nestrec.train`, `nestrec.evaluate`, `nestrec.follow` and `nestrec.load`."""

import gc
import pickle
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import nestrec
from nestrec.api import resolve_config
from nestrec.data.dataset import Dataset
from nestrec.data.streaming.stream_source import SOURCES, StreamSourceSpec
from nestrec.training.callbacks import TrainingCallback
from support.tiny_runs import config_of, make_datasets


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_datasets(folder)
    return folder


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> nestrec.Run:
    """A run of SASRec."""
    overrides = {"training.epochs": 1, "task.evaluation.filter_seen": "history", "task.evaluation.ks": [10, 60]}
    return nestrec.train(config_of("sasrec", data), overrides, output=tmp_path_factory.mktemp("runs") / "run")


def test_evaluate_run_is_repeatable(run: nestrec.Run) -> None:
    assert run.evaluation is not None
    assert run.steps > 0
    assert (run.folder / "checkpoints").is_dir()
    again = nestrec.evaluate(run)
    assert repr(again.to_plain()) == repr(run.evaluation.to_plain()), (
        "compared as text, because metrics without an interval contain NaN"
    )
    assert nestrec.evaluate(str(run.folder), "valid", best=False).part == "valid"


def test_train_evaluate_load_leak_no_objects(data: Path, tmp_path: Path) -> None:
    def train_and_count(number: int) -> dict[str, int]:
        overrides = {"training.max_steps": 1, "training.eval_every_epochs": 0}
        run = nestrec.train(config_of("hstu", data), overrides, output=tmp_path / f"{number}")
        nestrec.evaluate(run)
        run.load().recommend({"items": ["1", "2"], "times_ms": [1, 2]}, k=1)
        gc.collect()
        counts = Counter(type(each).__name__ for each in gc.get_objects())
        process = {"files": psutil.Process().num_fds(), "threads": threading.active_count()}
        return process | {
            name: counts[name] for name in ("Trainer", "Session", "EmbeddingEngine", "Tensor", "Parameter")
        }

    first = train_and_count(0)  # includes objects that other tests have left
    assert [train_and_count(number) for number in (1, 2)] == [first] * 2


def test_load_recommends_as_evaluated(run: nestrec.Run, data: Path) -> None:
    """The rank of the last item of each user in the recommendations for the earlier events equals the evaluation."""
    dataset = Dataset.open(data / "sequences")
    items, offsets = dataset.rows(np.arange(dataset.num_samples)).lists["item_ids"]
    keys = dataset.items().column("item_key").to_pylist()
    users = run.evaluation.details["users"]
    events = [[keys[i - 1] for i in items[offsets[user] : offsets[user + 1]]] for user in users]
    model = run.load()
    found = model.recommend_batch([keys[:-1] for keys in events], k=dataset.num_items)
    rank = [
        ranking.items.index(keys[-1]) + 1 if keys[-1] in ranking.items else 0
        for keys, ranking in zip(events, found, strict=True)
    ]
    assert rank == run.evaluation.details["rank/model"].tolist()
    assert model.recommend(events[0][:-1], k=3).items == found[0].items[:3]


def test_train_callback_receives_steps_and_run_resumes(data: Path, tmp_path: Path) -> None:
    class FirstStepRecorder(TrainingCallback):
        first: int = -1

        def on_train_start(self, total_steps: int, first_step: int) -> None:
            self.first = first_step

    short = {"training.max_steps": 2, "training.eval_every_epochs": 0}
    nestrec.train(config_of("hstu", data), short, output=tmp_path / "run")
    recorder = FirstStepRecorder()
    run = nestrec.train(
        tmp_path / "run/config.json", {"training.max_steps": 3}, output=tmp_path / "run", callback=recorder
    )
    assert (recorder.first, run.steps) == (2, 3)


def test_train_of_finished_run_names_option_to_continue(data: Path, tmp_path: Path) -> None:
    class MessageRecorder(TrainingCallback):
        def __init__(self) -> None:
            self.notes: list[str] = []

        def on_message(self, message: str) -> None:
            self.notes.append(message)

    def messages_of(**training: int) -> list[str]:
        recorder = MessageRecorder()
        nestrec.train(config_of("hstu", data), {"training": training}, output=tmp_path / "run", callback=recorder)
        return recorder.notes

    assert messages_of(max_steps=4, eval_every_epochs=0) == []
    prefix = "training is complete after step 4: to continue training, set "
    assert messages_of(max_steps=2, eval_every_epochs=0) == [f"{prefix}--training.max_steps above 4"]
    both = f"{prefix}--training.epochs above 1 and --training.max_steps above 4"
    assert messages_of(max_steps=4, epochs=1, eval_every_epochs=0) == [both]
    assert messages_of(max_steps=5, epochs=2, eval_every_epochs=0) == []


def test_overrides_accept_values_and_text(tmp_path: Path) -> None:
    values = {
        "training.epochs": 2,
        "task.evaluation.ks": [10, 5],
        "training.early_stopping_patience": None,
        "data.folder": tmp_path,
    }
    texts = {
        "training.epochs": "2",
        "task.evaluation.ks": "10,5",
        "training.early_stopping_patience": "none",
        "data.folder": str(tmp_path),
    }
    assert resolve_config("demo", values) == resolve_config("demo", texts)
    assert resolve_config("demo", values).data.synthetic is None
    assert resolve_config(resolve_config("demo"), {"training.epochs": 3}).training.epochs == 3


def test_train_nested_overrides_keep_other_fields() -> None:
    nested = resolve_config("ml_1m_hstu", {"training": {"epochs": 2}, "task": {"evaluation": {"ks": [10, 5]}}})
    assert nested == resolve_config("ml_1m_hstu", {"training.epochs": 2, "task.evaluation.ks": [10, 5]})
    chosen = resolve_config("ml_1m_hstu", {"task.encoder": {"kind": "sasrec", "dim": 16}})
    assert chosen.task.encoder.kind == "sasrec"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda run: nestrec.train("demo", output=3), "output=3: must be a path"),
        (
            lambda run: nestrec.train("demo", {"data.folder": print}),
            "data.folder=<built-in.*: unsupported type of value",
        ),
        (lambda run: nestrec.train("demo", callback=print), "callback=.*: must be a TrainingCallback"),
        (lambda run: nestrec.train("demo", window_hooks=print), "window_hooks=.*: must be a list of functions"),
        (lambda run: nestrec.evaluate(run, None), "part=None: no such data split"),
        (lambda run: nestrec.follow(None, run), "source=None: must be a path"),
        (lambda run: nestrec.append(None, "data"), "dataset=.*: the folder is not a prepared dataset"),
        (lambda run: nestrec.prepare("log", "a.csv", None), "output=None: must be a path"),
        (lambda run: nestrec.prepare(None, "a.csv", "data"), "format=None: no such format"),
        (
            lambda run: nestrec.prepare("log", "a.csv", "data", min_events_per_user=print),
            "min_events_per_user=<built-in.*: unsupported type of value",
        ),
    ],
)
def test_python_calls_reject_invalid_arguments(
    call: Callable[[nestrec.Run], Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(nestrec.UserError, match=words):
        call(nestrec.Run(folder=tmp_path, steps=1, evaluation=None))
    assert list(tmp_path.iterdir()) == []


def test_train_closes_all_files(run: nestrec.Run) -> None:
    descriptors = Path("/proc/self/fd")
    if not descriptors.is_dir():
        pytest.skip("this system does not list the files of a process")
    opened = [str(Path(entry).resolve()) for entry in descriptors.iterdir()]
    assert [name for name in opened if name.startswith(str(run.folder.resolve()))] == []


@pytest.mark.parametrize("name", ["demmo", "no/such.json"])
def test_train_rejects_unknown_recipe(name: str) -> None:
    with pytest.raises(nestrec.UserError):
        nestrec.train(name)


def test_load_rejects_other_folders(tmp_path: Path) -> None:
    with pytest.raises(nestrec.UserError, match="does not contain a run"):
        nestrec.load(tmp_path)


@pytest.mark.parametrize("use", [nestrec.load, nestrec.evaluate, lambda run: nestrec.follow("events", run)])
def test_evaluate_rejects_other_folders(use: Callable[[Any], Any]) -> None:
    with pytest.raises(nestrec.UserError, match=r"run=None: .*(Pass|Give) "):
        use(None)


LOG = {"log.user": "user", "log.item": "item", "log.time": "time", "log.time_unit": "ms"}


def test_follow_accepts_path_as_source(run: nestrec.Run, tmp_path: Path) -> None:
    with pytest.raises(nestrec.UserError, match=r"SOURCE=.*nowhere: the folder does not exist"):
        nestrec.follow(
            tmp_path / "nowhere",
            run,
            LOG,
        )


def test_follow_inherits_options_of_dataset(tmp_path: Path) -> None:
    """If one log option is set, the others keep the values of the dataset, as on the command line."""
    events = [f"u{u},i{(u + i) % 7},{1_700_000_000 + 60 * i + u}" for u in range(12) for i in range(6)]
    for name, lines in (("log.csv", events[:60]), ("more/events.csv", events[60:])):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("\n".join(["uid,iid,ts", *lines]) + "\n")
    columns = {"log.user": "uid", "log.item": "iid", "log.time": "ts"}
    nestrec.prepare("log", tmp_path / "log.csv", tmp_path / "data", **columns)
    small = {
        "data.folder": tmp_path / "data",
        "task.loss": "full",
        "training.max_steps": 2,
        "training.eval_every_epochs": 0,
    }
    trained = nestrec.train("demo", small, output=tmp_path / "run")
    options = {"log.max_future_s": 600, "stop_after_idle_s": 0.01, "window.events": 12}
    assert nestrec.follow(tmp_path / "more", trained, options).steps > 2
    assert Dataset.open(tmp_path / "data").card.counts.events == 72


def test_follow_names_plugin_source_that_returns_none(run: nestrec.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = StreamSourceSpec("nothing", lambda address: address == "mine://events", lambda *_: None)  # type: ignore[arg-type, return-value]
    monkeypatch.setitem(SOURCES._built_in, "mine", nothing)
    with pytest.raises(
        nestrec.UserError, match=r"sources: mine=open: its `open` returned None for mine://events.*Fix `open`"
    ):
        nestrec.follow("mine://events", run, LOG)


def test_public_names_are_exported() -> None:
    for name in nestrec.__all__:
        assert getattr(nestrec, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        nestrec.trian  # noqa: B018


def test_evaluate_rejects_unknown_split(run: nestrec.Run) -> None:
    before = sorted(run.folder.rglob("*"))
    with pytest.raises(nestrec.UserError, match=r"(?s)part=tst: no such data split.*Did you mean 'test'"):
        nestrec.evaluate(run, "tst")  # type: ignore[arg-type]
    assert sorted(run.folder.rglob("*")) == before


def test_train_rejects_overrides_of_wrong_type() -> None:
    with pytest.raises(nestrec.UserError, match=r"(?s)overrides=training.epochs=2: .*\{"):
        nestrec.train("demo", "training.epochs=2")  # type: ignore[arg-type]
    with pytest.raises(nestrec.UserError, match="5=2: no such option"):
        nestrec.train("demo", {5: 2})  # type: ignore[dict-item]


def test_train_names_missing_data_folder(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(nestrec.UserError, match=rf"(?s)data.folder=sequences: .*the current folder is {tmp_path}"):
        nestrec.train(config_of("sasrec", data), {"data.folder": "sequences"}, output=tmp_path / "run")


def test_python_errors_name_arguments(data: Path, tmp_path: Path) -> None:
    with pytest.raises(nestrec.UserError) as caught:
        nestrec.train("auto")
    assert "--" not in str(caught.value)
    with pytest.raises(nestrec.UserError, match=r"batch.batch_size none") as caught:
        nestrec.train(config_of("hstu", data), {"batch.batch_tokens": 64}, output=tmp_path)
    assert "--" not in str(caught.value)
    (tmp_path / "log.csv").write_text("u,i\n1,2\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "card.json").write_text("{}")
    with pytest.raises(nestrec.UserError, match="force=True"):
        nestrec.prepare("log", tmp_path / "log.csv", tmp_path / "data", **{"log.user": "u", "log.item": "i"})


def test_public_functions_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(nestrec.train)) is nestrec.train


def test_batch_inference_uses_users_of_run(run: nestrec.Run, tmp_path: Path) -> None:
    count = nestrec.load(run).batch().recommend("all", tmp_path / "recs.parquet")
    assert count == Dataset.open(resolve_config(run.folder / "config.json").data.folder).num_samples


class _Frame:
    """Stand-in for a data frame, with a long text and without a hash."""

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "user item\n" * 60

    def to_parquet(self, path: str) -> None: ...


def test_prepare_rejects_data_frames(tmp_path: Path) -> None:
    with pytest.raises(nestrec.UserError, match=r"class .*_Frame: must be a path\. Write the table to a file"):
        nestrec.prepare("log", _Frame(), tmp_path / "data")  # type: ignore[arg-type]
    with pytest.raises(nestrec.UserError, match=r"class .*_Frame: no such format\. Known names: .*log"):
        nestrec.prepare(_Frame(), "log", tmp_path / "data")  # type: ignore[arg-type]


def test_train_recipe_name_wins_over_folder_of_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("demo", "mine"):
        Path(name).mkdir()
        Path(name, "config.json").write_text("{}")
    assert resolve_config("demo").name == "demo"
    with pytest.raises(nestrec.UserError, match="RECIPE=mine: is a run folder"):
        resolve_config("mine")
