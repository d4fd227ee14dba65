import pytest
import torch

from nestrec.base.errors import PeerLostError, UserError
from nestrec.distributed import GradientReducer, Topology
from nestrec.distributed.collectives import (
    all_gather_json,
    all_gather_rows,
    all_to_all_rows,
    assert_same_on_all_ranks,
    barrier,
    broadcast_json,
    raise_on_all_ranks,
    watch_collective,
)


def test_topology_of_one_process_has_no_groups():
    topology = Topology.single()
    rows = torch.arange(6).view(3, 2)
    assert all_to_all_rows(topology.vectors, rows, [3], [3]) is rows
    assert all_gather_rows(topology.vectors, topology.keys, rows)[0] is rows
    assert all_gather_json(topology.control, {"a": [1, None, "é"]}) == [{"a": [1, None, "é"]}]
    assert broadcast_json(topology.control, 3) == 3
    assert_same_on_all_ranks(topology.control, "x", 1)
    barrier(topology.control)
    raise_on_all_ranks(topology.control, None)
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), 3.0)
    GradientReducer([parameter], topology.dense).reduce()
    assert parameter.grad.tolist() == [3.0, 3.0]
    assert topology.log.entries() == []
    assert (topology.shard, topology.replica, topology.num_shards) == (0, 0, 1)


def test_topology_without_torchrun_is_one_process(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert Topology.from_environment().world == 1


def test_failed_collective_is_peer_lost_error_with_name():
    topology = Topology.single()
    lost = pytest.raises(PeerLostError, match=r"lost in keys\.all_to_all: connection closed")
    with lost, watch_collective(topology.keys, "all_to_all"):
        raise RuntimeError("connection closed\nmore")
    assert topology.log.entries() == ["keys.all_to_all"]


def test_local_error_of_collective_is_raised():
    with pytest.raises(UserError, match="is full"):
        raise_on_all_ranks(Topology.single().control, UserError("is full", option="disk", value=1, remedy="free space"))
