"""Where tables may be held whole by every rank, and where that is fewer bytes."""

from dataclasses import replace
from typing import Any

import pytest

from nestrec.base.errors import UserError
from nestrec.distributed import Topology
from nestrec.embedding import StoreConfig, TableConfig
from nestrec.embedding.table_config import bytes_crossed, check_placements, check_tables, with_placements
from nestrec.tasks.table_overrides import TableOverrides, chosen_tables

SMALL = TableConfig(name="small", dim=16, num_rows=100, placement="replicated")


def crossed(**changes: Any) -> Any:
    usual = {"vector_bytes": 64, "gradient_bytes": 64, "ranks": 2, "used": 100, "asked": 100, "micro_batches": 4}
    return bytes_crossed(**{**usual, **changes})


@pytest.mark.parametrize(
    ("changes", "fewer"),
    [
        ({}, "replicated"),
        ({"micro_batches": 1}, "sharded"),
        ({"asked": 10}, "sharded"),
        ({"ranks": 16}, "sharded"),
        ({"ranks": 16, "vector_bytes": 512, "gradient_bytes": 512}, "replicated"),
    ],
)
def test_rows_that_many_micro_batches_use_cross_in_fewer_bytes_where_all_ranks_hold_them(changes, fewer):
    assert crossed(**changes).fewer == fewer


def test_a_table_that_leaves_it_open_is_placed_by_bytes_and_others_stay():
    tables = [replace(SMALL, name=name, placement="auto") for name in ("few", "many", "unknown")] + [SMALL]
    tables.append(TableConfig(name="dynamic", dim=4, placement="auto"))
    by_bytes = {"few": crossed(), "many": crossed(asked=10), "dynamic": crossed()}
    found = {table.name: table.placement for table in with_placements(tables, by_bytes)}
    assert found == {
        "few": "replicated",
        "many": "sharded",
        "unknown": "sharded",
        "small": "replicated",
        "dynamic": "sharded",
    }


@pytest.mark.parametrize(
    "change", [{"num_rows": None}, {"store": StoreConfig(kind="disk", folder="somewhere")}], ids=["dynamic", "disk"]
)
def test_what_cannot_be_held_whole_is_refused_by_name(change):
    with pytest.raises(UserError, match=r"tables.small.placement"):
        check_tables([replace(SMALL, **change)])


def test_replica_groups_hold_no_whole_tables():
    topology = Topology.single()
    check_placements([SMALL], topology)
    with pytest.raises(UserError, match=r"replica groups.*"):
        check_placements([SMALL], replace(topology, num_replicas=2))


def test_what_is_said_of_all_tables_holds_for_those_that_can_be_so():
    tables = [replace(SMALL, placement="sharded"), TableConfig(name="users", dim=4)]
    found = chosen_tables(tables, {"*": TableOverrides(placement="replicated")}).tables
    assert [table.placement for table in found] == ["replicated", "sharded"]
    with pytest.raises(UserError, match=r"tables.users.placement.*admitted"):
        chosen_tables(tables, {"users": TableOverrides(placement="replicated")})
