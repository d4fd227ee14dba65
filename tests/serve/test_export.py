"""An exported model scores as `nestrec eval` does, and a changed folder is refused."""

import contextlib
import random
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from nestrec.base.config import dumps
from nestrec.base.config_overrides import parse_overrides, with_overrides
from nestrec.base.errors import CorruptFileError, UserError
from nestrec.data.samples.retrieval_collator import RetrievalQueries
from nestrec.data.samples.retrieval_inputs import CONTEXT_PREFIX
from nestrec.data.samples.time_windows import held_out_slices
from nestrec.exporters.export_checks import check_defaults
from nestrec.exporters.servable_writer import ExportConfig, export_run
from nestrec.models import FuXiConfig, HSTUConfig, SASRecConfig
from nestrec.serving.core.request_limits import BadRequestError, LimitsConfig
from nestrec.serving.engine.reference_runner import BatchItem, ReferenceRunner
from nestrec.serving.inputs.request_resolver import RequestNotes, RequestResolver
from nestrec.serving.inputs.request_schema import RecommendRequest
from nestrec.serving.kv_cache.kv_page_pool import PagePool
from nestrec.serving.model.model_adapter import make_form
from nestrec.serving.model.request_inputs import Candidates, History
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.servable_spec import ColumnSpec, InputDefaults
from nestrec.serving.model.serving_spec import why_not_served
from nestrec.tasks.ranking_task import RankingTaskConfig
from nestrec.tasks.task_registry import task_spec
from nestrec.training.recipes import RECIPES, recipe
from nestrec_bench.harness.random_model import random_ranking, random_retrieval

SMALL = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=8, time_bias=True)
TAB = ColumnSpec(name=f"{CONTEXT_PREFIX}tab", keys=("home", "search"), num_rows=3)


def make_runner(folder):
    form = make_form(Servable.load(folder), slide_events=1)
    dtype = form.encoder.position.dtype
    pool = PagePool(form.encoder.cfg, num_pages=1, page_tokens=1, device=torch.device("cpu"), dtype=dtype)
    return ReferenceRunner(form, pool)


def full_scores(runner, histories, candidates):
    parts = []
    for history, asked in zip(histories, candidates, strict=True):
        tokens = runner.form.tokens(history, asked.now_ms)
        parts.append(BatchItem(tokens=tokens, first=0, end=tokens.length, pages=[], store_until=0, candidates=asked))
    return runner.run(parts)


def test_exported_retrieval_ranks_the_catalogue_as_eval_does(retrieval):
    evaluation = retrieval.trainer.evaluate("test")
    dataset = retrieval.trainer.session.dataset
    task = retrieval.trainer.session.task
    runner = make_runner(retrieval.folder)
    queries = RetrievalQueries(dataset, task._split, task.cfg.history, "test", use_times=False)
    assert np.array_equal(evaluation.details["users"], queries.users)
    items, offsets = dataset.rows(queries.users).lists["item_ids"]
    times = dataset.rows(queries.users).lists["timestamps_ms"][0]
    histories, asked, targets = [], [], []
    for b in range(len(queries.users)):
        target = int(offsets[b]) + int(queries.target_at[b])
        past = slice(int(offsets[b]), target)
        histories.append(
            History(items=items[past], times_ms=times[past], actions=np.zeros(past.stop - past.start, np.int64))
        )
        asked.append(Candidates(items=np.arange(1, dataset.num_items + 1), now_ms=int(times[target])))
        targets.append(int(items[target]))
    expected = evaluation.details["rank/model"]
    k = max(task.cfg.evaluation.ks)
    for b, scores in enumerate(full_scores(runner, histories, asked)):
        values = scores.scores[:, 0].copy()
        values[histories[b].items[-runner.form.max_events :] - 1] = -np.inf
        order = np.lexsort((np.arange(len(values)), -values))
        rank = int(np.flatnonzero(order == targets[b] - 1)[0]) + 1
        assert (rank if rank <= k else 0) == expected[b]


@pytest.mark.parametrize("model", ["ranking", "half_ranking"])
def test_exported_ranking_gives_the_logits_of_eval(request, model):
    ranking = request.getfixturevalue(model)
    evaluation = ranking.trainer.evaluate("test")
    dataset = ranking.trainer.session.dataset
    task = ranking.trainer.session.task
    runner = make_runner(ranking.folder)
    windows = held_out_slices(task._split, "test", task.cfg.inputs.max_events, task._slide_events)
    assert len(windows) > 50
    windows = windows[:50]
    histories, asked, expected = [], [], []
    place = 0
    for user, first, end, scored_from in windows.tolist():
        rows = dataset.rows(np.array([user]))
        lists = {name: values for name, (values, _) in rows.lists.items()}
        for event in range(scored_from, end):
            past = slice(first, event)
            actions = lists["actions"][past].astype(np.int64)
            histories.append(
                History(items=lists["item_ids"][past], times_ms=lists["timestamps_ms"][past], actions=actions)
            )
            asked.append(
                Candidates(items=lists["item_ids"][event : event + 1], now_ms=int(lists["timestamps_ms"][event]))
            )
            expected.append(evaluation.details["logit"][place])
            place += 1
    assert place > 200
    found = np.concatenate([scored.scores for scored in full_scores(runner, histories, asked)])
    assert np.abs(found - np.array(expected)).max() <= 1e-5


def test_unknown_items_get_the_vector_that_evaluation_uses(retrieval):
    servable = Servable.load(retrieval.folder)
    assert servable.ids_of(["no such item", servable.item_keys[4], int(servable.item_keys[7])]).tolist() == [0, 5, 8]
    seen = retrieval.trainer.session.engine.lookup_readonly({"history": np.array([0])})["history"]
    assert torch.equal(servable.tables["items"].rows(torch.tensor([0])), seen)


def test_an_export_holds_no_code(ranking):
    names = {path.name for path in ranking.folder.iterdir()}
    assert names
    assert all(name.endswith((".json", ".safetensors")) for name in names)


def test_every_changed_folder_is_refused(retrieval, tmp_path):
    rng = random.Random(1)
    files = sorted(retrieval.folder.iterdir())
    for number in range(60):
        copy = tmp_path / str(number)
        copy.mkdir()
        for file in files:
            (copy / file.name).write_bytes(file.read_bytes())
        victim = copy / rng.choice(files).name
        content = bytearray(victim.read_bytes())
        damage = rng.choice(["flip", "cut", "remove", "add"])
        if damage == "flip":
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            victim.write_bytes(content)
        elif damage == "cut":
            victim.write_bytes(content[: rng.randrange(len(content))])
        elif damage == "remove":
            victim.unlink()
        else:
            (copy / "extra.py").write_text("print()")
        if damage == "flip" and victim.name == "manifest.json":
            with contextlib.suppress(CorruptFileError):  # a changed blank leaves the manifest what it was
                assert Servable.load(copy).version == Servable.load(retrieval.folder).version
        else:
            with pytest.raises(CorruptFileError):
                Servable.load(copy)


def test_an_export_that_runs_through_a_file_is_refused_by_name(retrieval, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        export_run(retrieval.run, tmp_path / "file" / "model")


def test_an_export_never_overwrites(retrieval, tmp_path):
    with pytest.raises(UserError, match="exists already"):
        export_run(retrieval.run, retrieval.folder)


def test_what_cannot_be_served_is_not_exported(tmp_path, monkeypatch):
    """Before anything is opened: there is neither a dataset nor a checkpoint here."""
    cfg = recipe("criteo_dlrm")
    spec = replace(task_spec(recipe("criteo_dlrm").task), serving=None)
    monkeypatch.setattr("nestrec.serving.model.serving_spec.task_spec", lambda task: spec)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(dumps(cfg))
    with pytest.raises(UserError, match=r"rows.*cannot be served: it has no") as refused:
        export_run(tmp_path / "run", tmp_path / "model")
    assert "docs/serving.md" in str(refused.value)
    assert not (tmp_path / "model").exists()


def test_the_table_of_what_can_be_served_is_that_of_the_code():
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    rows = dict(re.findall(r"^\| (\w+), (?:retrieval|ranking|rows) +\| (yes|no)", text, re.MULTILINE))
    kinds = {make().task.encoder.kind: why_not_served(make().task) is None for make in RECIPES.values()}
    assert {kind: rows[kind] == "yes" for kind in kinds} == kinds


def test_a_ranking_model_with_any_encoder_of_ours_is_served():
    for encoder in (HSTUConfig(), FuXiConfig(), SASRecConfig()):
        assert why_not_served(RankingTaskConfig(encoder=encoder)) is None


def test_an_export_names_defaults_that_are_served(ranking, tmp_path):
    key = Servable.load(ranking.folder).item_keys[3]
    defaults = InputDefaults(history=(key,), times="now", actions=("click",))
    export_run(ranking.run, tmp_path / "model", defaults=defaults)
    assert Servable.load(tmp_path / "model").spec.defaults == defaults


@pytest.mark.parametrize(
    ("kind", "defaults", "problem"),
    [
        ("retrieval", InputDefaults(actions=("click",)), r"defaults.actions.*is not read by the model"),
        ("retrieval", InputDefaults(history=("nope",)), r"defaults.history.*'nope'.*is no item"),
        ("retrieval", InputDefaults(history=()), r"defaults.history.*stands for nobody"),
        ("retrieval", InputDefaults(features={"tab": "1"}), r"defaults.features.*'tab'.*is no category"),
        ("ranking", InputDefaults(actions=("clack",)), r"defaults.actions.*'clack'(.|\n)*did you mean 'click'"),
        ("ranking", InputDefaults(history=("1",), times="now"), r"defaults.history(.|\n)*add --defaults.actions"),
    ],
)
def test_defaults_that_could_not_be_taken_are_refused(request, kind, defaults, problem):
    with pytest.raises(UserError, match=problem):
        check_defaults(defaults, Servable.load(request.getfixturevalue(kind).folder))


def test_an_export_with_a_default_that_could_not_be_taken_writes_nothing(retrieval, tmp_path):
    with pytest.raises(UserError, match=r"defaults.history.*'nope'.*is no item"):
        export_run(retrieval.run, tmp_path / "model", defaults=InputDefaults(history=("nope",)))
    assert list(tmp_path.iterdir()) == []


def test_a_default_must_be_known_and_read():
    servable = random_ranking(HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=8), num_items=5)
    check_defaults(InputDefaults(features={"tab": "home"}), servable)
    check_defaults(InputDefaults(features={"tab": None}), servable)
    with pytest.raises(UserError, match=r"defaults.features.tab = 'hme'(.|\n)*did you mean 'home'"):
        check_defaults(InputDefaults(features={"tab": "hme"}), servable)
    with pytest.raises(UserError, match=r"defaults.times=now: is not read by the model"):
        check_defaults(InputDefaults(times="now"), servable)


def remedy_defaults(remedy):
    """Return the defaults that a remedy names, read as `nestrec export` reads them."""
    words = shlex.split(remedy.replace("ITEM,ITEM", "1,2").partition(", which")[0])
    start = next(i for i, word in enumerate(words) if word.startswith("--defaults."))
    return with_overrides(ExportConfig(), parse_overrides(words[start:])).defaults


@pytest.mark.parametrize(
    ("columns", "defaults"),
    [((), {}), ((TAB,), {}), ((TAB,), {"tab": "home"})],
    ids=["plain", "context", "context with a default"],
)
def test_new_user_remedy_is_a_complete_export_line(columns, defaults):
    plain = random_retrieval(SMALL, num_items=5)
    spec = replace(plain.spec, columns=columns, defaults=InputDefaults(features=defaults))
    servable = replace(plain, spec=spec)
    resolver = RequestResolver(servable, LimitsConfig(), RequestNotes())
    with pytest.raises(BadRequestError) as refused:
        resolver.user(RecommendRequest(user="stranger"))
    assert "nestrec export RUN OUT --defaults.history ITEM,ITEM --defaults.times now" in refused.value.remedy
    named = remedy_defaults(refused.value.remedy)
    check_defaults(named, servable)
    assert named.features == ({"tab": defaults.get("tab")} if columns else {})


def test_default_history_error_names_values_to_add():
    servable = random_ranking(SMALL, num_items=5)
    with pytest.raises(UserError) as refused:
        check_defaults(InputDefaults(history=("1",)), servable)
    assert refused.value.remedy.startswith("add --defaults.times now --defaults.actions ")
    check_defaults(replace(remedy_defaults(refused.value.remedy), history=("1",)), servable)
