"""Requests of users who come back: what they have told before, and a few more events."""

import json

import pytest

from nestrec_bench.load_test.load_test import RequiredInputs
from nestrec_bench.load_test.user_bodies import UserBodies

ITEMS = [f"item {i}" for i in range(50)]


MUCH = RequiredInputs(actions=("click", "like"), features=("tab",), user_features=("age",))


@pytest.mark.parametrize("reads", [RequiredInputs(), MUCH], ids=["little", "much"])
def test_a_user_comes_back_with_the_same_events_and_some_more(reads):
    users = UserBodies(ITEMS, reads, new_events=3, seed=1)
    (asks, signal, rank), (_, _, later) = ([json.loads(body) for body in users.of((5, 9), 4, 7, v)] for v in (0, 2))
    length = asks["events"]
    assert length in (5, 9)
    assert signal["history"] == rank["history"]
    assert asks["num_candidates"] == signal["num_candidates"] == len(rank["candidates"]) == 4
    columns, more = ({**h.pop("features", {}), **h} for h in (rank["history"], later["history"]))
    assert set(columns) == {"items", "times_ms", *(("actions", "tab") if reads.actions else ())}
    assert all(len(values) == length and more[name][:length] == values for name, values in columns.items())
    assert all(len(values) == length + 6 for values in more.values())
    assert columns["times_ms"] == sorted(columns["times_ms"])
    assert set(columns["items"]) <= set(ITEMS)
    assert ("context" in rank, "user_features" in rank) == (bool(reads.features), bool(reads.user_features))


def test_users_differ_in_length_and_events():
    users = UserBodies(ITEMS, RequiredInputs(), new_events=3, seed=1)
    told = [json.loads(users.of((5, 9), 4, user, 0)[1])["history"]["items"] for user in range(20)]
    assert {len(items) for items in told} == {5, 9}
    assert len({tuple(items) for items in told}) == 20
