"""Identity of a run in files of an earlier release, whose options had other names."""

from typing import Any

import pytest

from nestrec.artifacts.manifest import digest_of_plain
from nestrec.base.config import leaves
from nestrec.training import run_identity
from nestrec.training.recipes import RECIPES
from nestrec.training.run_identity import Identity

COURSE: list[Any] = [[0, {"ranks.exchange": "auto", "optimizer.clip_norm": 1.0, "ranks": 2}], [6, {"ranks": 4}]]
STORED: dict[str, Any] = {
    "run": "0123456789abcdef",
    "seed": 7,
    "model": {"task.kind": "retrieval", "batch.batch_samples": 8, "tables.item_meta.price.rows": 5},
    "course": COURSE,
}


def digest_of_former(course: list[Any]) -> str:
    return digest_of_plain({**STORED, "course": course})[:16]


def test_run_identity_reads_former_option_names() -> None:
    """The name of the table contains a dot."""
    identity = Identity.from_plain(STORED)
    assert identity.model == {"task.kind": "retrieval", "batch.batch_size": 8, "tables.item_meta.price.num_rows": 5}
    first, second = identity.option_history
    assert first == (0, {"parallel.transport": "auto", "optimizer.max_grad_norm": 1.0, "ranks": 2})
    assert second == (6, {"ranks": 4})


def test_run_identity_digests_include_former_option_names() -> None:
    """Versions that an earlier release published contain the digest of the former names."""
    identity = Identity.from_plain(STORED)
    for step, course in ((9, COURSE), (6, COURSE[:1])):
        present, former = identity.digests_at(step)
        assert former == digest_of_former(course)
        assert present != former
        assert identity.at(step).digests_at(step) == [present, former]
    assert Identity.from_plain(identity.to_plain()).digests_at(9)[0] == identity.digests_at(9)[0]


@pytest.mark.parametrize("prefixes", [run_identity._FIXED, run_identity._TRACKED], ids=["fixed", "tracked"])
def test_run_identity_prefixes_match_options(prefixes: tuple[str, ...]) -> None:
    names = {name for make in RECIPES.values() for name in leaves(make())} | {"tables.items.dim"}
    assert [prefix for prefix in prefixes if not any(name.startswith(prefix) for name in names)] == []
