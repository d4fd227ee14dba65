"""Quantized exports: their content, their quality loss, and the quantization report of a server."""

from contextlib import closing

import numpy as np
import pytest
import torch
from featured_runs import request_for, select_features
from test_http import call

from nestrec.base.config import to_plain
from nestrec.base.errors import UserError
from nestrec.data.samples.split import split_dataset
from nestrec.exporters.export_checks import move_servable
from nestrec.exporters.servable_writer import export_run, quantize_servable
from nestrec.inference.recommender import Recommender
from nestrec.serving.core.request_limits import LimitsConfig
from nestrec.serving.http.http_app import App
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.served_tables import TablesConfig, dequantize_rows, quantize_rows, quantized_width
from nestrec.serving.service.inference_service import Service, ServiceConfig
from nestrec.tasks.metrics import auc


@pytest.mark.parametrize(("kind", "tolerance"), [("int8", 1 / 254), ("fp8", 1 / 16)])
def test_quantized_rows_are_close_with_scale_per_row(kind, tolerance):
    rows = torch.randn(50, 16) * torch.logspace(-6, 6, 50)[:, None]
    rows[7] = 0.0
    packed = quantize_rows(rows, kind)
    assert packed.shape == (50, quantized_width(16))
    error = (dequantize_rows(packed, kind) - rows).abs()
    assert (error <= tolerance * 1.01 * rows.abs().amax(1, keepdim=True)).all()
    assert error.max() > 0


def table_bytes(folder):
    return sum(path.stat().st_size for path in folder.glob("table-*.safetensors"))


def test_quantization_of_ranking_export_reports_cost(ranking, tmp_path):
    folder = tmp_path / "model"
    manifest = export_run(ranking.run, folder, dtype="bfloat16", table_dtype="int8", kv_cache_dtype="fp8")
    cost = manifest.precision
    assert (cost.dtype, cost.tables, cost.prefixes, cost.metric) == ("bfloat16", "int8", "fp8", "auc")
    assert cost.num_requests > 20
    assert 0 < cost.mean_difference <= cost.largest_difference < 0.1 * cost.mean_score
    assert 0.8 <= cost.overlap <= 1.0
    assert abs(cost.before - cost.after) < 0.05
    assert table_bytes(folder) < 0.5 * table_bytes(ranking.folder)
    servable = Servable.load(folder)
    original = Servable.load(ranking.folder)
    assert servable.dtype == torch.bfloat16
    assert servable.encoder_config == original.encoder_config
    assert servable.model.encoder.layers[0].position_table.dtype == torch.float32
    ids = torch.tensor([0, 5, 9])
    quantized = servable.tables["items"].rows(ids)
    exact = original.tables["items"].rows(ids)
    assert 0 < (quantized - exact).abs().max() < 0.01 * exact.abs().max()
    cached = Servable.load(folder, tables=TablesConfig(store="dram", cache_rows=2))
    assert torch.equal(cached.tables["items"].rows(ids), quantized)
    with closing(Service({"ranking": servable}, ServiceConfig())) as service:
        app = App(service, LimitsConfig(default_timeout_ms=10_000))
        reported = call(app, "GET", "/v1/models").json()["models"]["ranking"]["precision"]
        assert reported == to_plain(cost)
        assert call(app, "GET", "/v1/status").json()["models"]["ranking"]["precision"] == reported


def test_quantization_of_retrieval_export_reports_cost(retrieval, tmp_path):
    cost = export_run(retrieval.run, tmp_path / "model", table_dtype="fp8").precision
    assert (cost.dtype, cost.tables, cost.metric) == ("run", "fp8", "ndcg@10")
    assert 0 < cost.mean_difference <= cost.largest_difference
    assert 0.5 <= cost.overlap <= 1.0
    assert cost.before is not None
    assert Servable.load(tmp_path / "model").index.weight.dtype == torch.bfloat16


def validation_requests(runs, role):
    """Yield (history, context, item, actions) of the last validation event of each user, from the log."""
    session = runs.trainer(role).session
    split = split_dataset(session.cfg.task.split, session.dataset)
    users = split.users_with("valid")
    for user in users[split.valid_end[users] > 1].tolist():
        event = int(split.valid_end[user]) - 1
        history, context, item = request_for(runs, user, event)
        history, context = select_features(session.cfg.task, history, context)
        action = session.dataset.rows(np.array([user])).lists["actions"][0][event]
        yield history, context, item, int(action)


def load_recommender(folder):
    """Load an exported model with the default `history_stride` of servers, so that full histories slide by blocks."""
    return Recommender(Servable.load(folder), history_stride=None)


def test_quantization_cost_of_retrieval_with_features(runs, tmp_path):
    role = "retrieval, prefix"
    requests = list(validation_requests(runs, role))
    cost = export_run(runs.run(role), tmp_path / "small", best=False, table_dtype="fp8").precision
    assert cost.num_requests == len(requests)

    def recommendations(model, requests):
        return [model.recommend(history, k=100, context=context) for history, context, *_ in requests]

    def ndcg(found):
        top_10 = [recommended.items[:10] for recommended in found]
        ranks = [
            items.index(item) if item in items else None
            for items, (_, _, item, _) in zip(top_10, requests, strict=True)
        ]
        return float(np.mean([0.0 if rank is None else 1 / np.log2(rank + 2) for rank in ranks]))

    original = load_recommender(runs.folder(role))
    full = recommendations(original, requests)
    quantized = recommendations(load_recommender(tmp_path / "small"), requests)
    assert (cost.before, cost.after) == pytest.approx((ndcg(full), ndcg(quantized)))
    scores = np.concatenate([np.abs(recommended.scores["score"]) for recommended in full])
    assert cost.mean_score == pytest.approx(float(scores.mean()), rel=1e-4)
    without_features = [
        ({**history, "features": {n: [None] * len(history["items"]) for n in history["features"]}}, context)
        for history, context, *_ in requests
    ]
    changed = recommendations(original, without_features)
    changed_scores = np.concatenate([np.abs(recommended.scores["score"]) for recommended in changed])
    assert abs(changed_scores.mean() - scores.mean()) > 1e-3 * scores.mean(), "scores depend on the features"


def test_quantization_cost_of_ranking_with_features(runs, tmp_path):
    role = "ranking, every kind"
    requests = list(validation_requests(runs, role))
    cost = export_run(runs.run(role), tmp_path / "small", best=False, table_dtype="fp8").precision
    original = load_recommender(runs.folder(role))
    name = original.outputs[0]
    bit = original.servable.spec.action_bits[name]
    labels = np.array([bool(action & bit) for *_, action in requests], np.int64)
    for folder, measured in ((runs.folder(role), cost.before), (tmp_path / "small", cost.after)):
        model = load_recommender(folder)
        found = [model.rank(h, [item], context=context).scores[name][0] for h, context, item, _ in requests]
        assert measured == pytest.approx(float(auc(labels, np.array(found, np.float64))))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is available")
def test_quantization_rejects_missing_device(retrieval, tmp_path):
    with pytest.raises(UserError, match="PyTorch does not find a CUDA device"):
        export_run(retrieval.run, tmp_path / "model", table_dtype="fp8", device="cuda")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tables", ["run", "int8"])
def test_quantization_moves_model_to_device(retrieval, ranking, tables):
    """The device `meta` simulates a second device."""
    for exported in (retrieval, ranking):
        original = Servable.load(exported.folder)
        moved = move_servable(quantize_servable(original, "run", tables, exported.folder.parent), "meta")
        tensors = [*moved.model.parameters(), *moved.model.buffers(), *moved.item_columns.values()]
        tensors += [part for table in (*moved.tables.values(), moved.index) if table for _, part in table.parts()]
        assert {tensor.device.type for tensor in tensors} == {"meta"}
        assert {tensor.device.type for tensor in original.model.parameters()} == {"cpu"}
        assert moved.spec == original.spec


def test_quantization_cost_uses_chosen_device(retrieval, tmp_path):
    """Tensors on `meta` have no data, so a computation on this device fails."""
    with pytest.raises(RuntimeError, match=r"meta|accelerator"):
        export_run(retrieval.run, tmp_path / "model", table_dtype="fp8", device="meta")
    assert not (tmp_path / "model").exists()


def test_export_without_quantization_reports_no_cost(retrieval):
    assert Servable.load(retrieval.folder).precision is None
