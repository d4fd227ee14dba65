"""A CTR model (DLRM) from training to `/v1/rank`: candidates are scored by their features, without a history."""

import json

import numpy as np
import pytest
from server_process import exchange, post, running_server, status_of
from small_recipes import train_and_export

from nestrec.base.errors import UserError
from nestrec.data.formats.criteo import CATEGORY_NAMES, DENSE_NAMES
from nestrec.exporters.servable_writer import export_run, restored_session
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.serving_spec import check_publishable
from nestrec.serving.service.inference_service import Service, ServiceConfig
from support.tiny_runs import config_of, make_datasets


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    root = tmp_path_factory.mktemp("rows")
    make_datasets(root)
    return train_and_export(config_of("rows", root), root), (root / "rows.txt").read_text().splitlines()


@pytest.fixture(scope="module")
def server(exported):
    with running_server(exported[0].folder, "--limits.default_timeout_ms", "10000") as (port, _):
        yield port


def send(port, path, body):
    response = exchange(port, post(path, body))
    return status_of(response), json.loads(response.partition(b"\r\n\r\n")[2])


def request_of(lines):
    """Return a ranking request with one candidate per line of the source; an empty field becomes null."""
    cells = [line.split("\t")[1:] for line in lines]
    columns = dict(zip((*DENSE_NAMES, *CATEGORY_NAMES), map(list, zip(*cells, strict=True)), strict=True))
    values = {n: [int(c) if c and n in DENSE_NAMES else c or None for c in column] for n, column in columns.items()}
    return {"user": "u", "candidates": [f"ad {i}" for i in range(len(lines))], "candidate_features": values}


def test_ctr_scores_equal_evaluation(exported, server):
    run, lines = exported
    with restored_session(run.run, best=True) as (session, _):
        evaluation = session.evaluate("test")
    rows = evaluation.details["users"]
    status, response = send(server, "/v1/rank", request_of([lines[row] for row in rows]))
    assert status == 200
    np.testing.assert_allclose(response["scores"]["label"], evaluation.details["logit"], atol=1e-6)
    assert (response["unknown_ids"], response["defaults_used"]) == ([], [])
    table = Servable.load(run.folder).tables["event_C1"]
    assert 0 < table.num_rows < 26 * 12, "some categories have no row and use their initial vectors"


def test_ctr_single_value_and_unread_history(exported, server):
    body = request_of([exported[1][0]] * 3)
    values = {name: value[0] for name, value in body["candidate_features"].items()}
    _, per_candidate = send(server, "/v1/rank", body)
    _, from_context = send(server, "/v1/rank", {**body, "candidate_features": {}, "context": values})
    _, with_history = send(server, "/v1/rank", {**body, "history": {"items": ["a", "b"], "times_ms": [1, 2]}})
    assert per_candidate["scores"] == from_context["scores"] == with_history["scores"]
    assert np.ptp(per_candidate["scores"]["label"]) < 1e-6


@pytest.mark.parametrize(
    ("path", "change", "status"),
    [
        ("/v1/rank", {"candidate_features": {"I1": 1}}, 400),
        ("/v1/rank", {"context": {"nothing": 1}}, 400),
        ("/v1/recommend", None, 404),
        ("/v1/preinfer", None, 202),
    ],
)
def test_ctr_missing_features_are_named(exported, server, path, change, status):
    body = (
        {**request_of(exported[1][:2]), **change} if change is not None else {"user": "u", "history": {"items": ["1"]}}
    )
    found, response = send(server, path, body)
    assert found == status
    assert response.get("admitted") in (None, False)


def test_ctr_models_endpoint_lists_required_fields(server):
    response = exchange(server, b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    model = json.loads(response.partition(b"\r\n\r\n")[2])["models"]["ranking"]
    assert model["features"] == [*DENSE_NAMES, *CATEGORY_NAMES]
    assert model["required_fields"] == [f"context.{name}" for name in model["features"]]


def test_ctr_rejects_quantization_and_publishing(exported, tmp_path):
    with pytest.raises(UserError, match="does not read histories"):
        export_run(exported[0].run, tmp_path / "model", dtype="bfloat16")
    with pytest.raises(UserError, match=r"rows.*cannot be published"):
        check_publishable(config_of("rows", tmp_path).task)


def test_ctr_rejects_table_with_wrong_keys(exported):
    servable = Servable.load(exported[0].folder)
    table = servable.tables["event_C1"]
    table.keys[0], table.keys[1] = table.keys[1], table.keys[0]
    with pytest.raises(UserError, match=r"row_keys.safetensors.*ascending"):
        Service({"ranking": servable}, ServiceConfig())
