"""Placement of tables: supported replicated tables, and the choice by bytes transferred."""

from dataclasses import replace
from typing import Any

import pytest

from nestrec.base.errors import UserError
from nestrec.distributed import Topology
from nestrec.embedding import StoreConfig, TableConfig
from nestrec.embedding.table_config import check_placements, check_tables, estimate_traffic, with_placements
from nestrec.tasks.table_overrides import TableOverrides, resolve_tables

SMALL = TableConfig(name="small", dim=16, num_rows=100, placement="replicated")


def estimate(**changes: Any) -> Any:
    defaults = {
        "vector_bytes": 64,
        "gradient_bytes": 64,
        "ranks": 2,
        "used_rows": 100,
        "requested_rows": 100,
        "micro_batches": 4,
    }
    return estimate_traffic(**{**defaults, **changes})


@pytest.mark.parametrize(
    ("changes", "cheaper"),
    [
        ({}, "replicated"),
        ({"micro_batches": 1}, "sharded"),
        ({"requested_rows": 10}, "sharded"),
        ({"ranks": 16}, "sharded"),
        ({"ranks": 16, "vector_bytes": 512, "gradient_bytes": 512}, "replicated"),
    ],
)
def test_placement_replicated_saves_bytes_for_reused_rows(changes, cheaper):
    assert estimate(**changes).cheaper_placement == cheaper


def test_placement_auto_is_chosen_by_bytes():
    tables = [replace(SMALL, name=name, placement="auto") for name in ("few", "many", "unknown")] + [SMALL]
    tables.append(TableConfig(name="dynamic", dim=4, placement="auto"))
    by_bytes = {"few": estimate(), "many": estimate(requested_rows=10), "dynamic": estimate()}
    placed = {table.name: table.placement for table in with_placements(tables, by_bytes)}
    assert placed == {
        "few": "replicated",
        "many": "sharded",
        "unknown": "sharded",
        "small": "replicated",
        "dynamic": "sharded",
    }


@pytest.mark.parametrize(
    "change", [{"num_rows": None}, {"store": StoreConfig(kind="disk", folder="somewhere")}], ids=["dynamic", "disk"]
)
def test_placement_replicated_rejects_unsupported_tables(change):
    with pytest.raises(UserError, match=r"tables.small.placement"):
        check_tables([replace(SMALL, **change)])


def test_placement_replica_groups_reject_replicated_tables():
    topology = Topology.single()
    check_placements([SMALL], topology)
    with pytest.raises(UserError, match=r"replica groups.*"):
        check_placements([SMALL], replace(topology, num_replicas=2))


def test_placement_of_all_tables_skips_unsupported():
    tables = [replace(SMALL, placement="sharded"), TableConfig(name="users", dim=4)]
    placed = resolve_tables(tables, {"*": TableOverrides(placement="replicated")}).tables
    assert [table.placement for table in placed] == ["replicated", "sharded"]
    with pytest.raises(UserError, match=r"tables.users.placement.*admitted"):
        resolve_tables(tables, {"users": TableOverrides(placement="replicated")})
