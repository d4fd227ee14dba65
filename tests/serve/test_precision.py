"""Exports in fewer bits: what they hold, what they cost, and that a server says so."""

from contextlib import closing

import numpy as np
import pytest
import torch
from featured_runs import known_to, request_of
from test_http import call

from nestrec.base.config import to_plain
from nestrec.base.errors import UserError
from nestrec.data.samples.split import split_of
from nestrec.exporters.export_checks import placed
from nestrec.exporters.servable_writer import export_run, in_fewer_bits
from nestrec.inference.recommender import Recommender
from nestrec.serving.core.request_limits import LimitsConfig
from nestrec.serving.http.http_app import App
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.served_tables import TablesConfig, packed_rows, packed_width, unpacked_rows
from nestrec.serving.service.inference_service import Service, ServiceConfig
from nestrec.tasks.metrics import auc


@pytest.mark.parametrize(("kind", "share"), [("int8", 1 / 254), ("fp8", 1 / 16)])
def test_rows_of_8_bits_are_near_with_a_scale_each(kind, share):
    rows = torch.randn(50, 16) * torch.logspace(-6, 6, 50)[:, None]
    rows[7] = 0.0
    packed = packed_rows(rows, kind)
    assert packed.shape == (50, packed_width(16))
    off = (unpacked_rows(packed, kind) - rows).abs()
    assert (off <= share * 1.01 * rows.abs().amax(1, keepdim=True)).all()
    assert off.max() > 0


def table_bytes(folder):
    return sum(path.stat().st_size for path in folder.glob("table-*.safetensors"))


def test_a_ranking_export_in_fewer_bits_tells_its_cost_and_is_served(ranking, tmp_path):
    folder = tmp_path / "model"
    manifest = export_run(ranking.run, folder, dtype="bfloat16", tables="int8", prefixes="fp8")
    cost = manifest.precision
    assert (cost.dtype, cost.tables, cost.prefixes, cost.metric) == ("bfloat16", "int8", "fp8", "auc")
    assert cost.num_requests > 20
    assert 0 < cost.mean_difference <= cost.largest_difference < 0.1 * cost.mean_score
    assert 0.8 <= cost.overlap <= 1.0
    assert abs(cost.before - cost.after) < 0.05
    assert table_bytes(folder) < 0.5 * table_bytes(ranking.folder)
    servable, whole = Servable.load(folder), Servable.load(ranking.folder)
    assert servable.dtype == torch.bfloat16
    assert servable.encoder_config == whole.encoder_config
    assert servable.model.encoder.layers[0].position_table.dtype == torch.float32
    ids = torch.tensor([0, 5, 9])
    near = servable.tables["items"].rows(ids)
    exact = whole.tables["items"].rows(ids)
    assert 0 < (near - exact).abs().max() < 0.01 * exact.abs().max()
    behind_cache = Servable.load(folder, tables=TablesConfig(store="dram", cache_rows=2))
    assert torch.equal(behind_cache.tables["items"].rows(ids), near)
    with closing(Service({"ranking": servable}, ServiceConfig())) as service:
        front = App(service, LimitsConfig(default_timeout_ms=10_000))
        told = call(front, "GET", "/v1/models").json()["models"]["ranking"]["precision"]
        assert told == to_plain(cost)
        assert call(front, "GET", "/v1/status").json()["models"]["ranking"]["precision"] == told


def test_a_retrieval_export_in_fewer_bits_tells_its_cost(retrieval, tmp_path):
    cost = export_run(retrieval.run, tmp_path / "model", tables="fp8").precision
    assert (cost.dtype, cost.tables, cost.metric) == ("run", "fp8", "ndcg@10")
    assert 0 < cost.mean_difference <= cost.largest_difference
    assert 0.5 <= cost.overlap <= 1.0
    assert cost.before is not None
    assert Servable.load(tmp_path / "model").index.weight.dtype == torch.bfloat16


def told_of_users(runs, role):
    """(request, context, held-out item, whether its first label was set) of each user's last event that validates, as
    the log tells them."""
    session = runs.trainer(role).session
    split = split_of(session.cfg.task.split, session.dataset)
    users = split.users_with("valid")
    for user in users[split.valid_end[users] > 1].tolist():
        event = int(split.valid_end[user]) - 1
        history, context, item = request_of(runs, user, event)
        history, context = known_to(session.cfg.task, history, context)
        action = session.dataset.rows(np.array([user])).lists["actions"][0][event]
        yield history, context, item, int(action)


def asked(folder):
    """As its server answers, where a full history slides by blocks."""
    return Recommender(Servable.load(folder), slide_events=None)


def test_the_cost_of_a_retrieval_model_is_measured_with_features_of_every_kind(runs, tmp_path):
    role = "retrieval, prefix"
    told = list(told_of_users(runs, role))
    cost = export_run(runs.run(role), tmp_path / "small", best=False, tables="fp8").precision
    assert cost.num_requests == len(told)

    def answers(model, users):
        return [model.recommend(history, k=100, context=context) for history, context, *_ in users]

    def ndcg(found):
        best = [one.items[:10] for one in found]
        places = [
            items.index(item) if item in items else None for items, (_, _, item, _) in zip(best, told, strict=True)
        ]
        return float(np.mean([0.0 if place is None else 1 / np.log2(place + 2) for place in places]))

    whole = asked(runs.folder(role))
    full, fewer = answers(whole, told), answers(asked(tmp_path / "small"), told)
    assert (cost.before, cost.after) == pytest.approx((ndcg(full), ndcg(fewer)))
    scores = np.concatenate([np.abs(one.scores["score"]) for one in full])
    assert cost.mean_score == pytest.approx(float(scores.mean()), rel=1e-4)
    silent = [
        ({**history, "features": {n: [None] * len(history["items"]) for n in history["features"]}}, context)
        for history, context, *_ in told
    ]
    unlike = np.concatenate([np.abs(one.scores["score"]) for one in answers(whole, silent)])
    assert abs(unlike.mean() - scores.mean()) > 1e-3 * scores.mean(), "scores depend on them"


def test_the_cost_of_a_ranking_model_is_measured_with_features_of_every_kind(runs, tmp_path):
    role = "ranking, every kind"
    told = list(told_of_users(runs, role))
    cost = export_run(runs.run(role), tmp_path / "small", best=False, tables="fp8").precision
    whole = asked(runs.folder(role))
    name = whole.outputs[0]
    bit = whole.servable.spec.action_bits[name]
    labels = np.array([bool(action & bit) for *_, action in told], np.int64)
    for folder, measured in ((runs.folder(role), cost.before), (tmp_path / "small", cost.after)):
        model = asked(folder)
        found = [model.rank(h, [item], context=context).scores[name][0] for h, context, item, _ in told]
        assert measured == pytest.approx(float(auc(labels, np.array(found, np.float64))))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure on")
def test_a_device_that_is_not_there_is_refused_before_anything_is_written(retrieval, tmp_path):
    with pytest.raises(UserError, match="torch finds no GPU here"):
        export_run(retrieval.run, tmp_path / "model", tables="fp8", device="cuda")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tables", ["run", "int8"])
def test_all_that_a_model_computes_with_moves_to_the_device_that_the_cost_is_measured_on(retrieval, ranking, tables):
    """`meta` stands for a device that is not here."""
    for exported in (retrieval, ranking):
        whole = Servable.load(exported.folder)
        moved = placed(in_fewer_bits(whole, "run", tables, exported.folder.parent), "meta")
        lies = [*moved.model.parameters(), *moved.model.buffers(), *moved.item_columns.values()]
        lies += [part for table in (*moved.tables.values(), moved.index) if table for _, part in table.parts()]
        assert {tensor.device.type for tensor in lies} == {"meta"}
        assert {tensor.device.type for tensor in whole.model.parameters()} == {"cpu"}
        assert moved.spec == whole.spec


def test_the_cost_is_measured_on_the_device_that_is_told(retrieval, tmp_path):
    """On `meta` there are no numbers: whoever computes there cannot come to an end."""
    with pytest.raises(RuntimeError, match=r"meta|accelerator"):
        export_run(retrieval.run, tmp_path / "model", tables="fp8", device="meta")
    assert not (tmp_path / "model").exists()


def test_an_export_as_it_was_trained_costs_nothing_and_says_nothing(retrieval):
    assert Servable.load(retrieval.folder).precision is None
