"""A server that has applied every delta is bitwise equal to a full export of the same step."""

import pytest
from changing_run import publish_versions

from support.tiny_runs import make_datasets


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    make_datasets(folder, num_topics=5)
    return folder


KINDS = [
    ("hstu", "ttl"), ("ranking", "lru"), ("hstu", "lru"), ("ranking", "static"), ("ranking", "ttl"), ("hstu", "hashed"),
    ("hstu", "narrow"), ("ranking", "narrow"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("world", "kind"), [(1, KINDS[0]), (1, KINDS[1]), (1, KINDS[6]), (2, KINDS[2]), (2, KINDS[3]), (2, KINDS[5])]
)
def test_version_deltas_equal_full_export(pools, data, tmp_path, world, kind):
    removed = pools[world].run(publish_versions, data, tmp_path, kind, 12)
    assert kind[1] not in ("lru", "ttl") or removed[0] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_version_200_deltas_equal_full_export(pools, data, tmp_path, world, kind):
    removed = pools[world].outcomes(publish_versions, data, tmp_path, kind, 200, timeout_s=800)
    assert isinstance(removed[0], int), removed
    assert kind[1] not in ("lru", "ttl") or removed[0] > 0
