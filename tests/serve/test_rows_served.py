"""A DLRM from training to `/v1/rank`: candidates by what is told of them, without a history and without a prefix."""

import json

import numpy as np
import pytest
from server_process import exchange, post, running_server, status_of
from small_recipes import train_and_export

from nestrec.base.errors import UserError
from nestrec.data.formats.criteo import CATEGORY_NAMES, DENSE_NAMES
from nestrec.exporters.servable_writer import export_run, restored_session
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.serving_spec import check_published
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


def ask(port, path, body):
    response = exchange(port, post(path, body))
    return status_of(response), json.loads(response.partition(b"\r\n\r\n")[2])


def told(lines):
    """What a request tells of rows of the source: a blank is what nobody knows."""
    cells = [line.split("\t")[1:] for line in lines]
    columns = dict(zip((*DENSE_NAMES, *CATEGORY_NAMES), map(list, zip(*cells, strict=True)), strict=True))
    values = {n: [int(c) if c and n in DENSE_NAMES else c or None for c in column] for n, column in columns.items()}
    return {"user": "u", "candidates": [f"ad {i}" for i in range(len(lines))], "candidate_features": values}


def test_scores_of_rows_are_those_of_evaluation(exported, server):
    run, lines = exported
    with restored_session(run.run, best=True) as (session, _):
        evaluation = session.evaluate("test")
    rows = evaluation.details["users"]
    status, answer = ask(server, "/v1/rank", told([lines[row] for row in rows]))
    assert status == 200
    np.testing.assert_allclose(answer["scores"]["label"], evaluation.details["logit"], atol=1e-6)
    assert (answer["unknown"], answer["defaults"]) == ([], [])
    table = Servable.load(run.folder).tables["event_C1"]
    assert 0 < table.num_rows < 26 * 12, "of some of the categories there is no row, and their vectors are initial ones"


def test_a_value_for_all_candidates_and_a_history_that_is_not_read(exported, server):
    body = told([exported[1][0]] * 3)
    values = {name: value[0] for name, value in body["candidate_features"].items()}
    _, apart = ask(server, "/v1/rank", body)
    _, together = ask(server, "/v1/rank", {**body, "candidate_features": {}, "context": values})
    _, beside = ask(server, "/v1/rank", {**body, "history": {"items": ["a", "b"], "times_ms": [1, 2]}})
    assert apart["scores"] == together["scores"] == beside["scores"]
    assert np.ptp(apart["scores"]["label"]) < 1e-6


@pytest.mark.parametrize(
    ("path", "change", "status"),
    [
        ("/v1/rank", {"candidate_features": {"I1": 1}}, 400),
        ("/v1/rank", {"context": {"nothing": 1}}, 400),
        ("/v1/recommend", None, 404),
        ("/v1/preinfer", None, 202),
    ],
)
def test_what_is_missing_is_named_and_nothing_is_computed_ahead(exported, server, path, change, status):
    body = {**told(exported[1][:2]), **change} if change is not None else {"user": "u", "history": {"items": ["1"]}}
    found, answer = ask(server, path, body)
    assert found == status
    assert answer.get("admitted") in (None, False)


def test_a_server_says_what_rows_are_told_by(server):
    response = exchange(server, b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    model = json.loads(response.partition(b"\r\n\r\n")[2])["models"]["ranking"]
    assert model["features"] == [*DENSE_NAMES, *CATEGORY_NAMES]
    assert model["reads"] == [f"context.{name}" for name in model["features"]]


def test_exports_in_fewer_bits_and_publishing_are_refused_by_name(exported, tmp_path):
    with pytest.raises(UserError, match="reads no histories"):
        export_run(exported[0].run, tmp_path / "model", dtype="bfloat16")
    with pytest.raises(UserError, match=r"rows.*cannot be published"):
        check_published(config_of("rows", tmp_path).task)


def test_a_table_whose_keys_are_not_those_of_its_rows_is_not_served(exported):
    servable = Servable.load(exported[0].folder)
    table = servable.tables["event_C1"]
    table.keys[0], table.keys[1] = table.keys[1], table.keys[0]
    with pytest.raises(UserError, match=r"row_keys.safetensors.*ascending"):
        Service({"ranking": servable}, ServiceConfig())
