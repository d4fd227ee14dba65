"""Options of tables by name: they set what they name, and invalid ones are rejected with their name."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.csv
import pytest
import torch

import nestrec
from nestrec.base.config_overrides import apply_overrides
from nestrec.base.errors import UserError, UserErrorGroup
from nestrec.data.formats.format_registry import prepare
from nestrec.data.prepare.prepare_options import LogColumns
from nestrec.data.synthetic import synthetic_logs as synthetic
from nestrec.distributed import Topology
from nestrec.embedding import TableConfig
from nestrec.embedding.hashing import hashed_rows
from nestrec.embedding.table_config import StoreConfig
from nestrec.exporters.servable_writer import export_run
from nestrec.serving.model.model_adapter import make_adapter
from nestrec.serving.model.servable import Servable
from nestrec.tasks.table_overrides import TableOverrides, resolve_tables, tables_with_option
from nestrec.training.recipes import recipe
from nestrec.training.trainer import Trainer
from support.tiny_runs import config_of, make_datasets

TABLES = [
    TableConfig(name="items", dim=8, num_rows=61, features=("item",)),
    TableConfig(name="item_brand", dim=8, num_rows=9),
    TableConfig(name="item_tags", dim=8, num_rows=12),
    TableConfig(name="event_brand", dim=8, num_rows=7),
]


def resolve(**options):
    overrides = {name.replace("every", "*"): TableOverrides(**values) for name, values in options.items()}
    return resolve_tables(TABLES, overrides, bags={"item_tags"})


def tables_by_name(resolved):
    return {table.name: table for table in resolved.tables}


def test_table_options_of_one_table_override_those_of_all():
    tables = tables_by_name(
        resolve(every={"dtype": "bfloat16", "dim": 4}, tags={"dtype": "float16"}, items={"dim": 32})
    )
    assert [t.dtype for t in tables.values()] == ["bfloat16", "bfloat16", "float16", "bfloat16"]
    assert [t.dim for t in tables.values()] == [32, 4, 4, 4]


def test_table_options_of_one_table_do_not_affect_others():
    tags = {"id_mode": "dynamic", "admission_threshold": 2, "eviction_policy": "lru", "max_rows": 5, "store": "dram"}
    tables = tables_by_name(resolve(tags=tags | {"optimizer": "adagrad"}, items={"id_mode": "hashed", "num_rows": 10}))
    assert tables["item_tags"].num_rows is None
    store = tables["item_tags"].store
    assert (store.kind, store.admission_threshold, store.eviction_policy, store.max_rows) == ("dram", 2, "lru", 5)
    assert tables["item_tags"].optimizer.kind == "adagrad"
    assert (tables["items"].num_rows, tables["items"].is_hashed) == (10, True)
    assert tables["event_brand"] == TABLES[3]


def test_table_can_be_shared_by_two_features():
    resolved = resolve(event_brand={"shared_with": "item_brand"})
    assert tables_by_name(resolved)["item_brand"].features == ("item_brand", "event_brand")
    assert resolved.num_ids == {"items": 61, "item_brand": 9, "item_tags": 12}
    assert resolved.table_of["event_brand"].name == "item_brand"


def test_pooling_of_bags_is_mean_unless_set():
    assert resolve().pooling == {"item_tags": "mean"}
    assert resolve(tags={"pooling": "sum"}).pooling == {"item_tags": "sum"}


@pytest.mark.parametrize(
    ("options", "option", "message"),
    [
        ({"tgs": {"dim": 4}}, "tables.tgs", "did you mean 'tags'.*items, item_brand, item_tags, event_brand"),
        ({"brand": {"dim": 4}}, "tables.brand", "event_brand or item_brand"),
        ({"items": {"pooling": "sum"}}, "tables.items.pooling", "one id"),
        ({"items": {"num_rows": 5}}, "tables.items.num_rows", "--tables.items.id_mode hashed"),
        ({"items": {"id_mode": "hashed"}}, "tables.items.id_mode", "--tables.items.num_rows"),
        ({"tags": {"max_rows": 5}}, "tables.tags.max_rows", "--tables.tags.id_mode dynamic"),
        (
            {"tags": {"id_mode": "dynamic", "eviction_policy": "lfu"}},
            "tables.tags.eviction_policy",
            "--tables.tags.max_rows",
        ),
        ({"event_brand": {"shared_with": "items", "dim": 4}}, "tables.event_brand.dim", "tables.items"),
        ({"event_brand": {"shared_with": "event_brand"}}, "tables.event_brand.shared_with", "its own rows"),
    ],
)
def test_table_options_invalid_are_rejected_by_name(options, option, message):
    with pytest.raises((UserError, UserErrorGroup)) as raised:
        resolve(**options)
    [error] = getattr(raised.value, "errors", [raised.value])
    assert error.option == option
    assert re.search(message, f"{error.problem} {error.remedy}"), error.remedy


def test_hashed_rows_stay_in_range_and_spare_the_unknown_row():
    rows = hashed_rows(np.array([[0, 1, 2**62], [-5, 7, 0]]), 4)
    assert rows.shape == (2, 3)
    assert (rows == 0).tolist() == [[True, False, False], [False, False, True]]
    assert 0 < rows[rows > 0].min() <= rows.max() < 4
    assert len(np.unique(hashed_rows(np.arange(1, 1000), 50))) == 49


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    make_datasets(folder, num_topics=4)
    return folder


RETRIEVAL = {"tables.items.dim": "12", "tables.items.id_mode": "dynamic", "tables.items.optimizer": "rowwise_adagrad"}
RANKING = {
    "tables.*.dtype": "bfloat16",
    "tables.items.dim": "4",
    "tables.items.store": "dram",
    "tables.topic.dim": "6",
    "tables.topic.id_mode": "hashed",
    "tables.topic.num_rows": "3",
}
ROWS = {"tables.categories.dim": "6", "tables.categories.dtype": "float16"}


@pytest.mark.parametrize(("family", "overrides"), [("hstu", RETRIEVAL), ("ranking", RANKING), ("rows", ROWS)])
def test_table_widths_are_trained_and_exported_by_every_task(data, tmp_path, family, overrides):
    cfg = config_of(family, data, {**overrides, "training.max_steps": "3"})
    trainer = Trainer(cfg, tmp_path / "run", Topology.single())
    trainer.train()
    widths = {name: table.dim for name, table in trainer.session.engine.tables.items()}
    assert widths[next(iter(widths))] == int(overrides.get("tables.items.dim", 6))
    if family != "rows":
        check_export(trainer, tmp_path, family)
    assert np.isfinite(trainer.evaluate("test").score)


def check_export(trainer: Trainer, tmp_path: Path, family: str) -> None:
    """Checks that an export has the item vectors that evaluation reads, in the model's width."""
    export_run(tmp_path / "run", tmp_path / "out", best=False)
    served = Servable.load(tmp_path / "out")
    task = trainer.session.task
    ids = np.arange(served.spec.num_items + 1)
    feature = "item" if family == "ranking" else "history"
    rows = trainer.session.engine.lookup_readonly({feature: ids})[feature]
    expected = task.model.to_width("items", rows).detach()
    torch.testing.assert_close(served.tables["items"].rows(torch.from_numpy(ids)), expected)
    if family == "ranking":
        content = task.item_content(trainer.session.engine, ids)
        topic = served.tables["item_topic"].rows(served.item_columns["item_topic"])
        torch.testing.assert_close(expected + topic, content)
    assert make_adapter(served).outputs


@pytest.fixture(scope="module")
def log_with_tags(tmp_path_factory) -> Path:
    """Dataset whose items have lists of tags, some of them empty."""
    folder = tmp_path_factory.mktemp("tags")
    synthetic.write_csv(synthetic.preset("tiny", num_users=30, num_items=40), folder / "log.csv")
    names = pyarrow.csv.read_csv(folder / "log.csv")["item"].unique().to_pylist()
    lines = [f"{name},{'|'.join(f't{(int(name) + k) % 7}' for k in range(int(name) % 4))}" for name in names]
    (folder / "items.csv").write_text("item,tags\n" + "\n".join(lines) + "\n")
    columns = LogColumns(time="time_ms", time_unit="ms", actions={a: a for a in ("click", "like")})
    tags = {"lists": ("tags",), "list_separator": "|"}
    prepare("log", folder / "log.csv", folder / "data", log=columns, items=str(folder / "items.csv"), item_columns=tags)
    return folder / "data"


def test_pooling_of_item_lists_is_equal_in_training_and_serving(log_with_tags, tmp_path):
    small = {"dim": "8", "head_dim": "4", "max_length": "16"}
    overrides = {f"task.encoder.{name}": value for name, value in small.items()}
    overrides |= {
        "task.history.max_events": "8",
        "task.inputs.item_features": "tags",
        "data.folder": str(log_with_tags),
    }
    overrides |= {
        "tables.tags.pooling": "sum",
        "tables.tags.dim": "4",
        "training.max_steps": "3",
        "training.device": "cpu",
    }
    trainer = Trainer(apply_overrides(recipe("ranking"), overrides), tmp_path / "run", Topology.single())
    trainer.train()
    export_run(tmp_path / "run", tmp_path / "out", best=False)
    task = trainer.session.task
    engine = trainer.session.engine
    user = np.array([0])
    rows = task._inputs.read(user)
    length = min(6, len(rows.lists["item_ids"][0]))
    batch = task._inputs.collate_chunks(rows, np.array([0]), np.array([length]), epoch=0)
    offline = task._logits(engine, batch)[-1]
    event = {name: rows.lists[name][0][:length] for name in ("item_ids", "timestamps_ms", "actions")}
    keys = trainer.session.dataset.items()["item_key"].to_pylist()
    named = [keys[i - 1] for i in event["item_ids"]]
    bits = trainer.session.dataset.card.action_bits
    actions = [[name for name, bit in bits.items() if mask & bit] for mask in event["actions"][:-1]]
    history = {"items": named[:-1], "times_ms": event["timestamps_ms"][:-1], "actions": actions}
    history["now_ms"] = int(event["timestamps_ms"][-1])
    served = nestrec.load(tmp_path / "out").rank(history, named[-1:])
    np.testing.assert_allclose([scores[0] for scores in served.scores.values()], offline, rtol=1e-4, atol=1e-5)
    spread = task.item_content(engine, np.arange(1, 5)) - task.model.to_width(
        "items", engine.lookup_readonly({"item": np.arange(1, 5)})["item"]
    )
    assert spread.abs().sum() > 0, "the tags do not affect the item vectors"


def test_table_placement_of_all_skips_unsupported_tables():
    tags = {"id_mode": "dynamic", "eviction_policy": "lru", "max_rows": 5}
    tables = tables_by_name(resolve(every={"placement": "replicated"}, tags=tags, items={"store": "disk"}))
    assert {name: table.placement for name, table in tables.items()} == {
        "items": "sharded", "item_brand": "replicated", "item_tags": "sharded", "event_brand": "replicated",
    }  # fmt: skip
    assert {t.placement for t in resolve(every={"placement": "sharded"}).tables} == {"sharded"}
    for others, message in (({"id_mode": "dynamic"}, "admitted"), ({"store": "disk"}, "disk")):
        with pytest.raises((UserError, UserErrorGroup)) as raised:
            resolve(tags={"placement": "replicated", **others})
        [error] = getattr(raised.value, "errors", [raised.value])
        assert error.option == "tables.tags.placement"
        assert message in str(error)


def test_table_ttl_steps_option_sets_ttl_eviction():
    store = tables_by_name(resolve(tags={"id_mode": "dynamic", "ttl_steps": 3}))["item_tags"].store
    assert (store.eviction_policy, store.ttl_steps) == ("ttl", 3)
    with pytest.raises((UserError, UserErrorGroup), match="ttl_steps 10000"):
        resolve(tags={"id_mode": "dynamic", "eviction_policy": "ttl"})


@pytest.mark.parametrize("of_all", [{}, {"ttl_steps": 3}], ids=["task", "all_tables"])
def test_table_eviction_policy_none_disables_ttl(of_all):
    """On the command line, `none` is the policy, and `null` keeps the task's setting."""
    store = StoreConfig(eviction_policy="ttl", ttl_steps=3)
    tables = [TableConfig(name=name, dim=8, num_rows=None, store=store) for name in ("items", "tags")]
    options = {"tables.items.eviction_policy": "none", "tables.tags.eviction_policy": "null"}
    overrides = apply_overrides(recipe("demo"), options).tables
    if of_all:
        overrides = {**overrides, "*": TableOverrides(**of_all)}
    resolved = tables_by_name(resolve_tables(tables, overrides))
    assert (resolved["items"].store.eviction_policy, resolved["items"].store.ttl_steps) == ("none", None)
    assert resolved["tags"].store == store


def test_tables_with_option_accepts_short_and_full_names():
    overrides = {"tags": TableOverrides(dim=4), "items": TableOverrides(dtype="bfloat16")}
    assert tables_with_option("dim", TABLES, overrides) == {"item_tags"}
    assert tables_with_option("store", TABLES, overrides) == set()
    assert tables_with_option("dtype", TABLES, {**overrides, "*": TableOverrides(dtype="float32")}) == {
        t.name for t in TABLES
    }


def test_table_ttl_and_max_rows_can_be_combined():
    store = tables_by_name(
        resolve(tags={"id_mode": "dynamic", "ttl_steps": 3, "eviction_policy": "lru", "max_rows": 5})
    )["item_tags"].store
    assert (store.eviction_policy, store.ttl_steps, store.max_rows) == ("lru", 3, 5)


def test_table_shared_by_features_has_the_rows_of_both():
    first = TableConfig(name="first", dim=8, num_rows=9)
    second = TableConfig(name="second", dim=8, num_rows=12)
    unknown = replace(second, num_rows=None)

    def joined(table, other, **options):
        resolved = resolve_tables([table, other], {"second": TableOverrides(shared_with="first")} | options)
        return resolved.tables[0].num_rows, resolved.num_ids["first"]

    hashed = {"first": TableOverrides(id_mode="hashed", num_rows=5)}
    assert joined(first, second) == (12, 12)
    assert joined(replace(first, num_rows=20), second) == (20, 20)
    assert joined(first, second, **hashed) == (5, 12), "a hashed table has the configured number of rows"
    assert joined(first, unknown) == (None, None)
    assert joined(replace(first, num_rows=None), second) == (None, None)
    assert joined(first, unknown, **hashed) == (5, None)
