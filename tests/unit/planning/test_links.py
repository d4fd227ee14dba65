"""Links: bytes, latency, messages and fan-in, level by level."""

import numpy as np
import pytest

from nestrec.planning.hardware_profile import Group, Link, Links

HOST = Link(name="host", ranks=4, gb_per_s=100.0, latency_us=1.0)
FABRIC = Link(name="fabric", ranks=0, gb_per_s=10.0, latency_us=5.0, message_us=2.0)
LINKS = Links((HOST, FABRIC))


def test_inside_a_host_only_its_link_counts():
    assert LINKS.all_to_all_s(Group(4), 4e9) == pytest.approx(3e9 / 100e9 + 1e-6)


def test_between_hosts_the_slower_link_counts_for_what_leaves():
    assert LINKS.all_to_all_s(Group(16), 16e9) == pytest.approx(12e9 / 10e9 + 6e-6 + 12 * 2e-6)


def test_a_strided_group_has_no_neighbours_in_its_host():
    assert Group(4, stride=4).within(4) == 1
    assert LINKS.bytes_leaving(Group(4, stride=4), 4e9) == {"host": 0.0, "fabric": 3e9}


def test_alone_nothing_takes_time():
    assert LINKS.all_to_all_s(Group(1), 1e9) == 0.0
    assert LINKS.all_reduce_s(Group(1), 1e9) == 0.0


def test_an_all_reduce_sends_between_hosts_what_a_host_has_left():
    expected = 2 * 3 / 4 * 4e9 / 100e9 + 2e-6 + 2 * 3 / 4 * 1e9 / 10e9 + 2 * (5 + 3 * 2) * 1e-6
    assert LINKS.all_reduce_s(Group(16), 4e9) == pytest.approx(expected)
    assert LINKS.bytes_reduced(Group(16), 4e9) == {"host": 6e9, "fabric": 1.5e9}


def test_fan_in_slows_the_bytes_down():
    slow = Links((Link(name="fabric", ranks=0, gb_per_s=10.0, fan_in=0.01),))
    fast = Links((Link(name="fabric", ranks=0, gb_per_s=10.0),))
    ratio = slow.all_to_all_s(Group(101), 1e9) / fast.all_to_all_s(Group(101), 1e9)
    assert ratio == pytest.approx(2.0)


def test_one_number_a_rank_is_taken_as_well():
    sizes = np.array([1e9, 2e9])
    one_by_one = [LINKS.all_to_all_s(Group(16), size) for size in sizes]
    assert LINKS.all_to_all_s(Group(16), sizes).tolist() == pytest.approx(one_by_one)
