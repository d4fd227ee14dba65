"""Costs of links: bytes, latency, messages and fan-in per level of the network."""

import numpy as np
import pytest

from nestrec.planning.hardware_profile import Group, Link, Links

HOST = Link(name="host", ranks=4, gb_per_s=100.0, latency_us=1.0)
FABRIC = Link(name="fabric", ranks=0, gb_per_s=10.0, latency_us=5.0, per_peer_latency_us=2.0)
LINKS = Links((HOST, FABRIC))


def test_links_within_a_host_use_only_the_host_link():
    assert LINKS.all_to_all_s(Group(4), 4e9) == pytest.approx(3e9 / 100e9 + 1e-6)


def test_links_between_hosts_use_the_slower_link():
    assert LINKS.all_to_all_s(Group(16), 16e9) == pytest.approx(12e9 / 10e9 + 6e-6 + 12 * 2e-6)


def test_links_strided_group_crosses_hosts():
    assert Group(4, stride=4).within(4) == 1
    assert LINKS.bytes_leaving(Group(4, stride=4), 4e9) == {"host": 0.0, "fabric": 3e9}


def test_links_single_rank_takes_no_time():
    assert LINKS.all_to_all_s(Group(1), 1e9) == 0.0
    assert LINKS.all_reduce_s(Group(1), 1e9) == 0.0


def test_links_all_reduce_bytes_between_hosts():
    expected = 2 * 3 / 4 * 4e9 / 100e9 + 2e-6 + 2 * 3 / 4 * 1e9 / 10e9 + 2 * (5 + 3 * 2) * 1e-6
    assert LINKS.all_reduce_s(Group(16), 4e9) == pytest.approx(expected)
    assert LINKS.bytes_reduced(Group(16), 4e9) == {"host": 6e9, "fabric": 1.5e9}


def test_links_fan_in_reduces_bandwidth():
    slow = Links((Link(name="fabric", ranks=0, gb_per_s=10.0, all_to_all_penalty=0.01),))
    fast = Links((Link(name="fabric", ranks=0, gb_per_s=10.0),))
    ratio = slow.all_to_all_s(Group(101), 1e9) / fast.all_to_all_s(Group(101), 1e9)
    assert ratio == pytest.approx(2.0)


def test_links_accept_one_number_per_rank():
    sizes = np.array([1e9, 2e9])
    one_by_one = [LINKS.all_to_all_s(Group(16), size) for size in sizes]
    assert LINKS.all_to_all_s(Group(16), sizes).tolist() == pytest.approx(one_by_one)
