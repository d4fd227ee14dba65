"""Load-test requests of returning users: the earlier history and a few more events."""

import json

import pytest

from nestrec_bench.load_test.load_test import RequiredInputs
from nestrec_bench.load_test.user_bodies import UserBodies

ITEMS = [f"item {i}" for i in range(50)]


ALL_INPUTS = RequiredInputs(actions=("click", "like"), features=("tab",), user_features=("age",))


@pytest.mark.parametrize("reads", [RequiredInputs(), ALL_INPUTS], ids=["no_features", "all_features"])
def test_load_test_returning_user_has_longer_history(reads):
    users = UserBodies(ITEMS, reads, new_events=3, seed=1)
    (estimate, preinfer, rank), (_, _, later) = (
        [json.loads(body) for body in users.of((5, 9), 4, 7, v)] for v in (0, 2)
    )
    length = estimate["num_events"]
    assert length in (5, 9)
    assert preinfer["history"] == rank["history"]
    assert estimate["num_candidates"] == preinfer["num_candidates"] == len(rank["candidates"]) == 4
    columns, more = ({**h.pop("features", {}), **h} for h in (rank["history"], later["history"]))
    assert set(columns) == {"items", "times_ms", *(("actions", "tab") if reads.actions else ())}
    assert all(len(values) == length and more[name][:length] == values for name, values in columns.items())
    assert all(len(values) == length + 6 for values in more.values())
    assert columns["times_ms"] == sorted(columns["times_ms"])
    assert set(columns["items"]) <= set(ITEMS)
    assert ("context" in rank, "user_features" in rank) == (bool(reads.features), bool(reads.user_features))


def test_load_test_users_differ_in_length_and_events():
    users = UserBodies(ITEMS, RequiredInputs(), new_events=3, seed=1)
    histories = [json.loads(users.of((5, 9), 4, user, 0)[1])["history"]["items"] for user in range(20)]
    assert {len(items) for items in histories} == {5, 9}
    assert len({tuple(items) for items in histories}) == 20
