"""Runs from Python: what `nestrec train` and `nestrec eval` do, with values instead of text."""

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
from nestrec.api import configured
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
    """SASRec, which no server serves: a loaded run recommends all the same."""
    overrides = {"training.epochs": 1, "task.evaluation.filter_seen": "history", "task.evaluation.ks": [10, 60]}
    return nestrec.train(config_of("sasrec", data), overrides, output=tmp_path_factory.mktemp("runs") / "run")


def test_a_run_is_measured_and_can_be_measured_again(run: nestrec.Run) -> None:
    assert run.evaluation is not None
    assert run.steps > 0
    assert (run.folder / "checkpoints").is_dir()
    again = nestrec.evaluate(run)
    assert repr(again.to_plain()) == repr(run.evaluation.to_plain()), "as text: metrics without an interval have NaN"
    assert nestrec.evaluate(str(run.folder), "valid", best=False).part == "valid"


def test_rounds_of_training_measuring_and_loading_leave_nothing_behind(data: Path, tmp_path: Path) -> None:
    def round_of(number: int) -> dict[str, int]:
        overrides = {"training.max_steps": 1, "training.evaluate_every_epochs": 0}
        run = nestrec.train(config_of("hstu", data), overrides, output=tmp_path / f"{number}")
        nestrec.evaluate(run)
        run.load().recommend({"items": ["1", "2"], "times_ms": [1, 2]}, k=1)
        gc.collect()
        kept = Counter(type(each).__name__ for each in gc.get_objects())
        process = {"files": psutil.Process().num_fds(), "threads": threading.active_count()}
        return process | {name: kept[name] for name in ("Trainer", "Session", "EmbeddingEngine", "Tensor", "Parameter")}

    first = round_of(0)  # what other tests have left is there all the time
    assert [round_of(number) for number in (1, 2)] == [first] * 2


def test_a_loaded_run_recommends_what_its_evaluation_measured(run: nestrec.Run, data: Path) -> None:
    """The rank of each user's last item among what is recommended to the events before it, user by user."""
    dataset = Dataset.open(data / "sequences")
    items, offsets = dataset.rows(np.arange(dataset.num_samples)).lists["item_ids"]
    keys = dataset.items().column("item_key").to_pylist()
    users = run.evaluation.details["users"]
    events = [[keys[i - 1] for i in items[offsets[user] : offsets[user + 1]]] for user in users]
    model = run.load()
    found = model.recommend_all([keys[:-1] for keys in events], k=dataset.num_items)
    rank = [
        ranking.items.index(keys[-1]) + 1 if keys[-1] in ranking.items else 0
        for keys, ranking in zip(events, found, strict=True)
    ]
    assert rank == run.evaluation.details["rank/model"].tolist()
    assert model.recommend(events[0][:-1], k=3).items == found[0].items[:3]


def test_whoever_listens_hears_of_steps_and_a_folder_with_checkpoints_goes_on(data: Path, tmp_path: Path) -> None:
    class Heard(TrainingCallback):
        first: int = -1

        def started(self, total_steps: int, first_step: int) -> None:
            self.first = first_step

    short = {"training.max_steps": 2, "training.evaluate_every_epochs": 0}
    nestrec.train(config_of("hstu", data), short, output=tmp_path / "run")
    heard = Heard()
    run = nestrec.train(
        tmp_path / "run/config.json", {"training.max_steps": 3}, output=tmp_path / "run", listener=heard
    )
    assert (heard.first, run.steps) == (2, 3)


def test_a_run_that_has_nothing_left_to_train_says_what_would_train_more(data: Path, tmp_path: Path) -> None:
    class Noted(TrainingCallback):
        def __init__(self) -> None:
            self.notes: list[str] = []

        def noted(self, message: str) -> None:
            self.notes.append(message)

    def noted_by(**training: int) -> list[str]:
        heard = Noted()
        nestrec.train(config_of("hstu", data), {"training": training}, output=tmp_path / "run", listener=heard)
        return heard.notes

    assert noted_by(max_steps=4, evaluate_every_epochs=0) == []
    told = "nothing is left to train after step 4: to train on, give "
    assert noted_by(max_steps=2, evaluate_every_epochs=0) == [f"{told}--training.max_steps above 4"]
    both = f"{told}--training.epochs above 1 and --training.max_steps above 4"
    assert noted_by(max_steps=4, epochs=1, evaluate_every_epochs=0) == [both]
    assert noted_by(max_steps=5, epochs=2, evaluate_every_epochs=0) == []


def test_overrides_are_values_or_text_as_typed(tmp_path: Path) -> None:
    of_values = {
        "training.epochs": 2,
        "task.evaluation.ks": [10, 5],
        "training.patience": None,
        "data.folder": tmp_path,
    }
    of_text = {
        "training.epochs": "2",
        "task.evaluation.ks": "10,5",
        "training.patience": "none",
        "data.folder": str(tmp_path),
    }
    assert configured("demo", of_values) == configured("demo", of_text)
    assert configured("demo", of_values).data.synthetic is None
    assert configured(configured("demo"), {"training.epochs": 3}).training.epochs == 3


def test_a_mapping_sets_the_fields_that_it_names_and_leaves_the_others_to_the_recipe() -> None:
    nested = configured("ml_1m_hstu", {"training": {"epochs": 2}, "task": {"evaluation": {"ks": [10, 5]}}})
    assert nested == configured("ml_1m_hstu", {"training.epochs": 2, "task.evaluation.ks": [10, 5]})
    chosen = configured("ml_1m_hstu", {"task.encoder": {"kind": "sasrec", "dim": 16}})
    assert chosen.task.encoder.kind == "sasrec"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda run: nestrec.train("demo", output=3), "output=3: is no path"),
        (
            lambda run: nestrec.train("demo", {"data.folder": print}),
            "data.folder=<built-in.*: is no value of an option",
        ),
        (lambda run: nestrec.train("demo", listener=print), "listener=.*: is no listener"),
        (lambda run: nestrec.train("demo", window_hooks=print), "window_hooks=.*: is no list of functions"),
        (lambda run: nestrec.evaluate(run, None), "part=None: is no part of the data"),
        (lambda run: nestrec.follow(None, run), "source=None: is no path"),
        (lambda run: nestrec.append(None, "data"), "dataset=.*: is not a prepared dataset"),
        (lambda run: nestrec.prepare("log", "a.csv", None), "output=None: is no path"),
        (lambda run: nestrec.prepare(None, "a.csv", "data"), "format=None: no such format"),
        (lambda run: nestrec.prepare("log", "a.csv", "data", user_core=print), "user_core=<built-in.*: is no value"),
    ],
)
def test_what_a_call_cannot_mean_is_refused_before_anything_is_written(
    call: Callable[[nestrec.Run], Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(nestrec.UserError, match=words):
        call(nestrec.Run(folder=tmp_path, steps=1, evaluation=None))
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_over_keeps_no_file_open(run: nestrec.Run) -> None:
    descriptors = Path("/proc/self/fd")
    if not descriptors.is_dir():
        pytest.skip("this system does not list the files of a process")
    opened = [str(Path(entry).resolve()) for entry in descriptors.iterdir()]
    assert [name for name in opened if name.startswith(str(run.folder.resolve()))] == []


@pytest.mark.parametrize("name", ["demmo", "no/such.json"])
def test_what_is_no_recipe_is_refused(name: str) -> None:
    with pytest.raises(nestrec.UserError):
        nestrec.train(name)


def test_a_folder_that_is_neither_a_run_nor_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(nestrec.UserError, match="is not the folder of a run"):
        nestrec.load(tmp_path)


@pytest.mark.parametrize("use", [nestrec.load, nestrec.evaluate, lambda run: nestrec.follow("events", run)])
def test_what_is_no_run_is_refused(use: Callable[[Any], Any]) -> None:
    with pytest.raises(nestrec.UserError, match=r"run=None: is n.*\. Give what nestrec.train gave"):
        use(None)


LOG = {"log.user": "user", "log.item": "item", "log.time": "time", "log.time_unit": "ms"}


def test_a_source_may_be_a_path(run: nestrec.Run, tmp_path: Path) -> None:
    with pytest.raises(nestrec.UserError, match=r"SOURCE=.*nowhere': is no source"):
        nestrec.follow(
            tmp_path / "nowhere",
            run,
            LOG,
        )


def test_a_stream_is_read_as_its_data_was_prepared_but_for_what_is_given(tmp_path: Path) -> None:
    """One option of the log leaves the others as they were, as on the command line."""
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
        "training.evaluate_every_epochs": 0,
    }
    trained = nestrec.train("demo", small, output=tmp_path / "run")
    options = {"log.max_ahead_s": 600, "idle_s": 0.01, "window.events": 12}
    assert nestrec.follow(tmp_path / "more", trained, options).steps > 2
    assert Dataset.open(tmp_path / "data").card.counts.events == 72


def test_a_source_of_others_that_opens_nothing_is_named(run: nestrec.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = StreamSourceSpec("nothing", lambda address: address == "mine://events", lambda *_: None)  # type: ignore[arg-type, return-value]
    monkeypatch.setitem(SOURCES._built_in, "mine", nothing)
    with pytest.raises(
        nestrec.UserError, match=r"sources: mine=open: its `open` gives None of mine://events.*.*mend `open`"
    ):
        nestrec.follow("mine://events", run, LOG)


def test_every_public_name_is_there() -> None:
    for name in nestrec.__all__:
        assert getattr(nestrec, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        nestrec.trian  # noqa: B018


def test_a_part_that_is_none_is_refused_and_not_kept(run: nestrec.Run) -> None:
    before = sorted(run.folder.rglob("*"))
    with pytest.raises(nestrec.UserError, match=r"(?s)part=tst: is no part.*did you mean 'test'"):
        nestrec.evaluate(run, "tst")  # type: ignore[arg-type]
    assert sorted(run.folder.rglob("*")) == before


def test_overrides_that_are_no_names_with_values_are_refused() -> None:
    with pytest.raises(nestrec.UserError, match=r"(?s)overrides=training.epochs=2: .*\{"):
        nestrec.train("demo", "training.epochs=2")  # type: ignore[arg-type]
    with pytest.raises(nestrec.UserError, match="5=2: no such option"):
        nestrec.train("demo", {5: 2})  # type: ignore[dict-item]


def test_data_that_is_looked_for_in_another_folder_says_where(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(nestrec.UserError, match=rf"(?s)data.folder = 'sequences'.*looked for in {tmp_path}"):
        nestrec.train(config_of("sasrec", data), {"data.folder": "sequences"}, output=tmp_path / "run")


def test_python_errors_name_arguments(data: Path, tmp_path: Path) -> None:
    with pytest.raises(nestrec.UserError) as caught:
        nestrec.train("auto")
    assert "--" not in str(caught.value)
    with pytest.raises(nestrec.UserError, match=r"batch.batch_samples none") as caught:
        nestrec.train(config_of("hstu", data), {"batch.batch_tokens": 64}, output=tmp_path)
    assert "--" not in str(caught.value)
    (tmp_path / "log.csv").write_text("u,i\n1,2\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "card.json").write_text("{}")
    with pytest.raises(nestrec.UserError, match="force=True"):
        nestrec.prepare("log", tmp_path / "log.csv", tmp_path / "data", **{"log.user": "u", "log.item": "i"})


def test_public_functions_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(nestrec.train)) is nestrec.train


def test_batch_takes_the_users_of_the_run(run: nestrec.Run, tmp_path: Path) -> None:
    count = nestrec.load(run).batch().recommend("all", tmp_path / "recs.parquet")
    assert count == Dataset.open(configured(run.folder / "config.json").data.folder).num_samples


class _Frame:
    """Stands for a data frame: its text has many lines, and it cannot be hashed."""

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "user item\n" * 60

    def to_parquet(self, path: str) -> None: ...


def test_prepare_of_a_frame_asks_for_a_file(tmp_path: Path) -> None:
    with pytest.raises(nestrec.UserError, match=r"class .*_Frame: is no path\. Write the table into a file"):
        nestrec.prepare("log", _Frame(), tmp_path / "data")  # type: ignore[arg-type]
    with pytest.raises(nestrec.UserError, match=r"class .*_Frame: no such format\. Known names: .*log"):
        nestrec.prepare(_Frame(), "log", tmp_path / "data")  # type: ignore[arg-type]
