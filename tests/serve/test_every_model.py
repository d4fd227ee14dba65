"""Every model that is trained is served: trained, exported and asked over HTTP, with scores that do not depend on what
is cached."""

from dataclasses import replace

import numpy as np
import pytest
from every_model import ENCODERS, FULL, SERVICE, TASKS, Exports, answers_of

from nestrec.models import backbone_registry
from nestrec.models.backbone_registry import BACKBONES


@pytest.fixture(scope="module")
def exports(tmp_path_factory, dataset_folder):
    return Exports(tmp_path_factory.mktemp("exports"), dataset_folder)


SHARDS = [pytest.param(250 * s, 250, id=f"shard{s}", marks=pytest.mark.slow) for s in range(5)]
"""With four models and two tasks, 10,000 sequences."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("first", "count"), [pytest.param(0, 6, id="some"), *SHARDS])
def test_what_was_trained_is_served_over_http_with_the_same_scores_cached_or_not(exports, task, name, first, count):
    folder = exports.folder(task, name)
    seeds = range(first, first + count)
    cached, full = (answers_of(folder, cfg, seeds) for cfg in (SERVICE, FULL))
    assert "device" in {source for _, sources in cached for source in sources}
    assert {source for _, sources in full for source in sources} == {"none"}
    scale = max(np.abs(scores).max() for scores, _ in full)
    worst = max(np.abs(a - b).max() for (a, _), (b, _) in zip(cached, full, strict=True))
    assert worst <= 1e-5 * max(1.0, scale)


def test_a_model_whose_backbone_keeps_nothing_is_served_by_the_same_front_without_prefixes(exports, monkeypatch):
    folder = exports.folder("ranking", "sasrec")
    expected = answers_of(folder, FULL, range(3))
    monkeypatch.setattr(backbone_registry, "backbone_of", lambda cfg: replace(BACKBONES.find(cfg.kind), cached=None))
    found = answers_of(folder, SERVICE, range(3))
    assert {source for _, sources in found for source in sources} == {"none"}
    assert max(np.abs(a - b).max() for (a, _), (b, _) in zip(found, expected, strict=True)) <= 1e-5
