"""Multi-task ranking learns from what came before an event, and from nothing else."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest

from nestrec.base.config_overrides import with_overrides
from nestrec.base.config_values import iso_moment, moment_ms
from nestrec.base.errors import UserError, UserErrorGroup
from nestrec.data.batch_loader import BatchConfig
from nestrec.data.dataset import Dataset
from nestrec.data.flat_arrays import history_start
from nestrec.data.formats.format_registry import prepare
from nestrec.data.formats.log_format import LogOptions
from nestrec.data.prepare.prepare_options import LogColumns
from nestrec.data.samples.chunk_collator import RankingChunkCollator
from nestrec.data.samples.ranking_collator import RankingInputConfig, RankingInputs
from nestrec.data.samples.split import Split, SplitConfig
from nestrec.data.samples.time_windows import TimeWindow, TrainingChunks, held_out_slices, slices_of_runs
from nestrec.data.synthetic import synthetic_logs as synthetic
from nestrec.distributed import Topology
from nestrec.embedding import EmbeddingEngine
from nestrec.models import HSTUConfig
from nestrec.pipeline.dense.dense_optimizer import OptimizerConfig
from nestrec.tasks.metrics import user_aucs
from nestrec.tasks.ranking_task import RankingTask, RankingTaskConfig
from nestrec.tasks.task_registry import _loss_of
from nestrec.training.recipes import recipe
from nestrec.training.run_config import DataConfig, RunConfig, TrainingConfig
from nestrec.training.trainer import Trainer

ACTIONS = ("click", "like", "long_view")
CUT_MS = (synthetic.START_MS + synthetic.SPAN_MS // 2, synthetic.START_MS + synthetic.SPAN_MS * 5 // 8)


def make_log(folder: Path, *, shuffled: bool) -> Path:
    """A synthetic log as a dataset; with shuffled labels the actions are dealt anew over all events."""
    raw = folder / "log.csv"
    output = folder / f"shuffled-{shuffled}"
    synthetic.write_csv(synthetic.preset("tiny", num_users=1200), raw)
    table = pyarrow.csv.read_csv(raw)
    if shuffled:
        order = np.random.default_rng(0).permutation(table.num_rows)
        for name in ACTIONS:
            table = table.set_column(table.column_names.index(name), name, pa.array(table[name].to_numpy()[order]))
    table = table.append_column("play_ms", table["click"])
    pyarrow.csv.write_csv(table, raw)
    columns = LogColumns(time="time_ms", time_unit="ms", actions={a: a for a in ACTIONS}, rating="play_ms")
    prepare("log", raw, output, options=LogOptions(log=columns))
    return output


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Path:
    return make_log(tmp_path_factory.mktemp("log"), shuffled=False)


def ranking_run(data: Path) -> RunConfig:
    return RunConfig(
        name="ranking",
        task=RankingTaskConfig(
            encoder=HSTUConfig(dim=16, head_dim=8, num_heads=2, num_layers=1, max_length=40, dropout=0.1),
            inputs=RankingInputConfig(labels=("click", "like"), max_events=20),
            split=SplitConfig(valid_from=iso_moment(CUT_MS[0]), test_from=iso_moment(CUT_MS[1])),
            baselines=("logistic",),
            at_once=0,
        ),
        data=DataConfig(folder=str(data)),
        batch=BatchConfig(batch_samples=64),
        optimizer=OptimizerConfig(learning_rate=5e-3),
        training=TrainingConfig(epochs=10, evaluate_every_epochs=0, device="cpu"),
    )


def trained_auc(data: Path, run: Path) -> tuple[float, float, float]:
    trainer = Trainer(ranking_run(data), run, Topology.single())
    trainer.train()
    interval = trainer.evaluate("test").metrics["model"]["auc/click"]
    return interval.mean, interval.low, interval.high


@pytest.mark.slow
def test_true_labels_are_learned_and_shuffled_ones_are_not(log, tmp_path):
    """With labels dealt at random over all events nothing can be predicted: a higher AUC would be a leak."""
    auc, low, _ = trained_auc(log, tmp_path / "true")
    assert low > 0.55, auc
    auc, low, high = trained_auc(make_log(tmp_path, shuffled=True), tmp_path / "shuffled-run")
    assert low < 0.5 < high, (auc, low, high)


def test_the_reaction_to_an_event_cannot_be_a_feature_of_its_content(log, tmp_path):
    dataset = Dataset.open(log)
    inputs = RankingInputConfig(labels=("click",), event_features=("rating",))
    with pytest.raises(UserError, match="known before the user reacts"):
        RankingInputs(dataset, inputs, seed=0)


def test_an_unknown_label_is_refused_with_the_known_ones(log, tmp_path):
    dataset = Dataset.open(log)
    with pytest.raises(UserError, match="did you mean 'click'"):
        RankingInputs(dataset, RankingInputConfig(labels=("clikc",)), seed=0)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("task.split.valid_from", {"split": SplitConfig(valid_from="2030-01-02", test_from="2030-01-01")}),
        ("task.baseline_category", {"baseline_category": "tab"}),
        ("task.inputs.labels", {"inputs": RankingInputConfig(labels=(), max_events=20)}),
    ],
    ids=["times out of order", "no such category", "nothing to predict"],
)
def test_what_cannot_be_trained_or_measured_is_refused_at_the_start(log, tmp_path, field, changes):
    cfg = ranking_run(log)
    with pytest.raises(UserError) as refused:
        RankingTask(replace(cfg.task, **changes), Dataset.open(cfg.data.folder), seed=0, dtype="float32")
    assert refused.value.option == field


def test_all_that_a_dataset_cannot_give_is_told_at_once(log, tmp_path):
    cfg = with_overrides(recipe("kuairand_ranking"), {"data.folder": str(log)})
    with pytest.raises(UserErrorGroup) as refused:
        RankingTask(
            replace(cfg.task, inputs=replace(cfg.task.inputs, labels=("clik", "buy"))),
            Dataset.open(cfg.data.folder),
            seed=0,
            dtype="float32",
        )
    fields = [error.option for error in refused.value.errors]
    assert fields.count("task.inputs.labels") == 2
    assert {f"task.inputs.{who}_features" for who in ("event", "user", "item")} < set(fields)
    assert "task.baseline_category" in fields


def test_dates_are_dates():
    assert moment_ms("2026-11-01", "x") == 1_793_491_200_000
    assert moment_ms("2026-11-01T02:00+02:00", "x") == 1_793_491_200_000
    assert moment_ms(iso_moment(1_793_491_200_123), "x") == 1_793_491_200_123
    with pytest.raises(UserErrorGroup) as refused:
        with_overrides(recipe("ranking"), {"task.split.valid_from": "1793491200000", "task.split.test_from": "May"})
    assert [e.option for e in refused.value.errors] == ["task.split.valid_from", "task.split.test_from"]


def test_without_dates_the_last_events_are_held_out():
    times = np.arange(1000)[::-1] * 10
    assert SplitConfig().cuts_ms(times) == (8000, 9000)
    assert SplitConfig(test_share=0.25, valid_share=0.05).cuts_ms(times) == (7000, 7500)
    last = int(times.max())
    assert SplitConfig(test_share=0, valid_share=0).cuts_ms(times) == (last + 1, last + 1), "no share is no event"
    assert SplitConfig(test_from=iso_moment(5000)).cuts_ms(times) == (4000, 5000)


def test_a_log_of_ones_own_is_ranked_by_its_own_recipe(log, tmp_path):
    small = {
        "task.encoder.dim": "8",
        "task.encoder.head_dim": "4",
        "task.inputs.max_events": "8",
        "task.encoder.max_length": "16",
        "training.epochs": "1",
        "training.device": "cpu",
    }
    cfg = with_overrides(recipe("ranking"), {"data.folder": str(log), **small})
    trainer = Trainer(cfg, tmp_path / "run", Topology.single())
    trainer.train()
    evaluation = trainer.evaluate("test")
    assert {"model", "logistic"} <= set(evaluation.metrics)
    assert trainer.session.task.num_held_out("test") > 0


def test_windows_score_every_held_out_event_once_with_history_before_it():
    generator = np.random.default_rng(0)
    train = generator.integers(0, 30, 200)
    valid = train + generator.integers(0, 40, 200)
    split = Split(train, valid, valid + 3)
    windows = held_out_slices(split, "valid", max_events=16, slide_events=2)
    scored = [(u, e) for u, _, end, start in windows for e in range(start, end)]
    assert sorted(scored) == [(u, e) for u in range(200) for e in range(train[u], valid[u])]
    assert (windows[:, 2] - windows[:, 1] <= 16).all()
    assert (windows[:, 1] >= 0).all()
    for _, first, end, start in windows.tolist():
        assert {history_start(event, 15, 2) for event in range(start, end)} == {first}


def test_all_events_of_long_histories_are_trained_on_if_asked(log):
    cfg = ranking_run(log).task
    inputs = replace(cfg.inputs, max_events=4, train_on="all")
    task = RankingTask(
        replace(cfg, inputs=inputs, encoder=replace(cfg.encoder, max_length=8)),
        Dataset.open(log),
        seed=0,
        dtype="float32",
    )
    samples = np.arange(len(task.assembler.tokens))
    batch = task.assembler.assemble(samples, task.assembler.read(samples), epoch=0)
    train_end = task._split.train_end
    assert train_end.max() > 8
    assert batch.tensors["scored"].sum() == train_end.sum() == task.assembler.weights.sum()
    assert batch.max_length == 8
    assert task.assembler.window_bounds is None


def test_asked_at_once_nothing_is_known_of_reactions_to_held_out_events(log, tmp_path):
    cfg = ranking_run(log)
    trainer = Trainer(replace(cfg, task=replace(cfg.task, at_once=300)), tmp_path / "run", Topology.single())
    task = trainer.session.task
    engine = trainer.session.engine
    slices = held_out_slices(task._split, "test", 20, task._slide_events)
    in_turn, _, users = task._scores(engine, slices)
    ends = task._split.valid_end, task._split.test_end
    found = task._asked_at_once(engine, np.stack([np.arange(len(ends[0])), *ends], axis=1), 300)
    assert 200 < len(found.events) <= 300
    in_turn, users, at_once = in_turn[found.events], users[found.events], found.logits
    is_first = np.append(True, users[1:] != users[:-1])
    assert np.allclose(at_once[is_first], in_turn[is_first], atol=1e-6)
    assert not np.allclose(at_once[~is_first], in_turn[~is_first], atol=1e-6)
    user = users[~is_first & (task._split.test_end <= 20)[users]][0]
    rows = task._inputs.read(np.array([user]))
    first, at = task._split.valid_end[[user]], task._split.valid_end[[user]] + 1
    events = [*range(first[0]), at[0]]
    batch = task._inputs.asked(rows, np.array([0]), first, at)
    assert batch.keys["item"].tolist() == rows.lists["item_ids"][0][events].tolist()
    assert batch.tensors["action"].tolist() == rows.lists["actions"][0][events].tolist()


def test_a_window_of_time_tells_gauc_of_events_that_were_asked_for_at_once(log, tmp_path):
    cfg = ranking_run(log)
    cfg = replace(cfg, task=replace(cfg.task, windows_at_once=100, inputs=replace(cfg.task.inputs, labels=("click",))))
    trainer = Trainer(cfg, tmp_path / "run", Topology.single())
    task = trainer.session.task
    engine = trainer.session.engine
    users = task._split.users_with("test")[:150]
    runs = np.stack([users, task._split.valid_end[users], task._split.test_end[users]], axis=1)
    found = task.predict(engine, TimeWindow(number=0, from_ms=0, to_ms=0, runs=runs))
    _, label_EK, user_E = task._scores(engine, slices_of_runs(runs, 20))
    listed = task._asked_at_once(engine, runs, 100)
    aucs, weights = user_aucs(label_EK[listed.events, 0], listed.logits[:, 0], user_E[listed.events])
    assert len(aucs) > 3
    assert found["gauc_at_once/click"].mean == pytest.approx(aucs @ weights / weights.sum())
    assert found["gauc_at_once/click"].mean != pytest.approx(found["gauc/click"].mean)


@pytest.mark.slow
def test_kuairand_ranking_beats_the_logistic_baseline_on_the_last_day(data_folder, tmp_path):
    data = tmp_path / "kuairand"
    prepare("kuairand", data_folder / "kuairand-pure", data)
    cfg = with_overrides(recipe("kuairand_ranking"), {"data.folder": str(data)})
    trainer = Trainer(cfg, tmp_path / "run", Topology.single())
    trainer.train()
    metrics = trainer.evaluate("test").metrics
    assert metrics["model"]["auc/click"].low > metrics["logistic"]["auc/click"].mean


def test_criteo_rows_beat_the_base_rate(data_folder, tmp_path):
    prepare("criteo", data_folder / "criteo-sample" / "criteo_first_7000.txt.gz", tmp_path / "criteo")
    cfg = with_overrides(recipe("criteo_dlrm"), {"data.folder": str(tmp_path / "criteo"), "training.device": "cpu"})
    trainer = Trainer(cfg, tmp_path / "run", Topology.single())
    trainer.train()
    metrics = trainer.evaluate("test").metrics
    assert metrics["model"]["log_loss"].mean < metrics["base rate"]["log_loss"].mean


def test_events_that_are_only_history_add_nothing_to_the_loss(log):
    """A slice of six scored events loses as much as six slices that score their last event alone."""
    task = RankingTask(ranking_run(log).task, Dataset.open(log), seed=0, dtype="float32")
    task.model.eval()
    engine = EmbeddingEngine(task.tables, Topology.single())
    user = int(np.flatnonzero(task._split.train_end >= 6)[0])

    def loss(*slices: tuple[int, int]) -> float:
        rows = np.array([(user, 0, end, scored) for end, scored in slices])
        task.assembler = RankingChunkCollator(task._inputs, TrainingChunks(rows, None), 0)
        return _loss_of("ranking", task, engine, np.arange(len(rows)))

    alone = [loss((end, end - 1)) for end in range(1, 7)]
    assert loss((6, 0)) == pytest.approx(sum(alone))
    assert loss((6, 4)) == pytest.approx(sum(alone[4:]))
    assert loss(*((end, end - 1) for end in range(1, 7))) == pytest.approx(sum(alone))
