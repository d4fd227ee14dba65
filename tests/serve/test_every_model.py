"""Every combination of task and encoder can be trained, exported and served, with scores independent of the cache."""

from dataclasses import replace

import numpy as np
import pytest
from every_model import ENCODERS, SERVICE, TASKS, WITHOUT_CACHE, Exports, scores_and_sources

from nestrec.models import backbone_registry
from nestrec.models.backbone_registry import BACKBONES


@pytest.fixture(scope="module")
def exports(tmp_path_factory, dataset_folder):
    return Exports(tmp_path_factory.mktemp("exports"), dataset_folder)


SHARDS = [pytest.param(250 * s, 250, id=f"shard{s}", marks=pytest.mark.slow) for s in range(5)]
"""Shards of 250 seeds; with four encoders and two tasks, 10,000 sequences."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("first", "count"), [pytest.param(0, 6, id="some"), *SHARDS])
def test_model_scores_with_and_without_cache_are_equal(exports, task, name, first, count):
    folder = exports.folder(task, name)
    seeds = range(first, first + count)
    cached, full = (scores_and_sources(folder, cfg, seeds) for cfg in (SERVICE, WITHOUT_CACHE))
    assert "device" in {source for _, sources in cached for source in sources}
    assert {source for _, sources in full for source in sources} == {"none"}
    scale = max(np.abs(scores).max() for scores, _ in full)
    worst = max(np.abs(a - b).max() for (a, _), (b, _) in zip(cached, full, strict=True))
    assert worst <= 1e-5 * max(1.0, scale)


def test_model_without_cached_forward_is_served(exports, monkeypatch):
    folder = exports.folder("ranking", "sasrec")
    expected = scores_and_sources(folder, WITHOUT_CACHE, range(3))
    monkeypatch.setattr(backbone_registry, "backbone_of", lambda cfg: replace(BACKBONES.find(cfg.kind), cached=None))
    found = scores_and_sources(folder, SERVICE, range(3))
    assert {source for _, sources in found for source in sources} == {"none"}
    assert max(np.abs(a - b).max() for (a, _), (b, _) in zip(found, expected, strict=True)) <= 1e-5
