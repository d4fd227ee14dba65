"""Tests of each plugin of the example package; test_plugin.py uses all of them together."""

import asyncio
import itertools
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import nestrec
from nestrec.base import plugins
from nestrec.data.dataset import Dataset
from nestrec.data.formats.format_registry import FORMATS
from nestrec.embedding.row_optimizer import ROW_OPTIMIZERS
from nestrec.models.backbone_registry import BACKBONES
from nestrec.models.hstu import HSTUConfig
from nestrec.pipeline.schedule_spec import SCHEDULES
from nestrec.serving.http.routes import ENDPOINTS
from nestrec.tasks.task_registry import TASKS
from nestrec_bench.bench import BENCHES
from nestrec_bench.harness.random_model import random_retrieval

PLUGIN = Path(__file__).resolve().parents[2] / "examples" / "plugin"
REGISTRIES = (BACKBONES, TASKS, ROW_OPTIMIZERS, SCHEDULES, FORMATS, ENDPOINTS, BENCHES)


def clear_registries() -> None:
    """Discard the discovered plugins: registries search entry points once per process."""
    for registry in REGISTRIES:
        registry.__dict__.pop("_external", None)


@pytest.fixture(autouse=True)
def entries(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, dict[str, str]]]:
    """Provide the entry points of the package, as if it were installed."""
    found = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]["entry-points"]
    points = [EntryPoint(name, value, group) for group, named in found.items() for name, value in named.items()]
    monkeypatch.syspath_prepend(PLUGIN)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point for point in points if point.group == group])
    clear_registries()
    yield found
    for registry in REGISTRIES:
        for name in found[registry.group]:
            registry._loaded.pop(name, None)
    clear_registries()
    for name in [name for name in sys.modules if name.partition(".")[0] == "nestrec_plugin"]:
        del sys.modules[name]


def test_plugin_registries_find_their_members(entries: dict[str, dict[str, str]]) -> None:
    assert {registry.group for registry in REGISTRIES} == set(entries)
    for registry in REGISTRIES:
        [name] = entries[registry.group]
        registry.find(name)


class Sum(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(2))

    def forward(self, vectors, batch):
        return (vectors["t"] * self.scale * batch["sign"][:, None]).sum(), len(batch["sign"])


def test_plugin_schedule_equals_serial_with_plugin_optimizer() -> None:
    def train(schedule: str) -> tuple[str, torch.Tensor]:
        table = nestrec.Table("t", rows=9, dim=2, optimizer="lion")
        adam = torch.optim.Adam(model.parameters(), lr=0.1)
        pipeline = nestrec.TrainingPipeline(
            model, [table], dense_optimizer=adam, schedule=schedule, micro_batches=2, table_learning_rate=0.5
        )
        before = pipeline.engine.lookup_readonly({"t": np.arange(9)})["t"].clone()
        batches = [{"t": np.arange(6) + i, "sign": torch.tensor([1.0, 1, 1, -1, -1, -1])} for i in range(3)]
        list(pipeline.run(iter(batches)))
        after = pipeline.engine.lookup_readonly({"t": np.arange(9)})["t"]
        digest = pipeline.digest()
        pipeline.close()
        return digest, after - before

    digests = []
    for schedule in ("serial", "lanes"):
        torch.manual_seed(0)
        model = Sum()
        digest, moved = train(schedule)
        digests.append(digest)
    assert digests[0] == digests[1]
    torch.testing.assert_close(moved[0], torch.full((2,), -0.5))  # one step with a positive gradient
    torch.testing.assert_close(moved[7], torch.full((2,), 0.5))


def test_plugin_format_reads_baskets_and_quarantines_bad_lines(tmp_path: Path) -> None:
    (tmp_path / "baskets.txt").write_text("ann: a b\nbob: c\nnobody\nann: c\n")
    card = nestrec.prepare("baskets", tmp_path / "baskets.txt", tmp_path / "data", max_bad_fraction=0.5)
    assert (card.counts.users, card.counts.items, card.counts.events) == (2, 3, 4)
    assert card.counts.quarantined == {"no items": 1}
    dataset = Dataset.open(tmp_path / "data")
    keys = dataset.items().column("item_key").to_pylist()
    items, offsets = dataset.rows(np.arange(2)).lists["item_ids"]
    users = [[keys[i - 1] for i in items[a:b]] for a, b in itertools.pairwise(offsets.tolist())]
    assert sorted(users) == [["a", "b", "c"], ["c"]]


def test_plugin_endpoint_finds_nearest_items() -> None:
    servable = random_retrieval(HSTUConfig(dim=4, num_layers=1, num_heads=1, head_dim=4, max_length=4), num_items=20)
    context = SimpleNamespace(service=SimpleNamespace(deployment=lambda role: SimpleNamespace(servable=servable)))
    similar = ENDPOINTS.find("similar")
    response = asyncio.run(similar.handle(context, similar.request(item="3", k=2)))
    vectors = servable.index.rows(torch.arange(20))
    expected = (vectors @ vectors[2]).index_fill(0, torch.tensor([2]), -torch.inf).topk(2)
    assert response["items"] == [str(i + 1) for i in expected.indices.tolist()]
    assert response["scores"] == pytest.approx(expected.values.tolist())


def test_plugin_bench_compares_row_optimizers() -> None:
    bench = BENCHES.find("lion")
    rows = list(bench.measure(bench.config(rows=10, dim=2, rounds=1)))
    assert [row["op"] for row in rows] == ["sgd", "lion"]
