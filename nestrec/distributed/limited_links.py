"""Real links of a given bandwidth between ranks on one machine: network namespaces, veth pairs and a bridge.

Each rank lives in a namespace of its own; a token bucket at each end of its link lets `link_mbit` through in either
direction. The queue is long (64 MB), since a short one drops packets and stalls TCP. Needs root. Namespaces, links and
the bridge carry the process id in their names and are removed in any case.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nestrec.base.errors import UserError

# A bucket fills while ranks compute, and what it holds passes at no cost: a large one would make small exchanges free.
BURST_BYTES = 128 << 10
_QUEUE = "64mb"
_CLONE_NEWNET = 0x40000000
_INSIDE = "link0"


@dataclass(frozen=True, slots=True)
class LimitedLinks:
    """Namespaces that exist, one for each rank."""

    namespaces: tuple[str, ...]

    def enter(self, rank: int) -> None:
        """Move this process into the namespace of a rank; before it has opened a socket or started a thread."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.namespaces[rank]}") as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "cannot enter the network namespace")
        os.environ["GLOO_SOCKET_IFNAME"] = _INSIDE


def can_limit() -> bool:
    """Whether this machine lets us make such links."""
    return os.geteuid() == 0 and shutil.which("ip") is not None and shutil.which("tc") is not None


def bytes_on_link() -> int:
    """Bytes that this process's end of such a link has sent so far; 0 outside a namespace."""
    path = Path("/proc/self/net/dev")
    for line in path.read_text().splitlines() if path.exists() else []:
        name, _, counters = line.partition(":")
        if name.strip() == _INSIDE:
            return int(counters.split()[8])
    return 0


@contextlib.contextmanager
def limited_links(num_ranks: int, link_mbit: float) -> Iterator[LimitedLinks]:
    """Namespaces of `num_ranks` ranks, joined by links of `link_mbit` megabits a second each way."""
    if not can_limit():
        remedy = "run as root where `ip` and `tc` exist, or measure without limits (link_mbit=0)"
        raise UserError("needs network namespaces", field="link_mbit", value=link_mbit, remedy=remedy)
    tag = f"{os.getpid():x}"
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # or nothing would be removed
    names = tuple(f"nestrec-{tag}-{rank}" for rank in range(num_ranks))
    bridge = f"nr{tag}b"
    try:
        _run(f"ip link add {bridge} type bridge")
        _run(f"ip link set {bridge} up")
        for rank, name in enumerate(names):
            _join(name, bridge, f"nr{tag}.{rank}", rank, link_mbit)
        yield LimitedLinks(names)
    finally:
        for rank, name in enumerate(names):
            _run(f"ip link del nr{tag}.{rank}", must_work=False)
            _run(f"ip netns del {name}", must_work=False)
        _run(f"ip link del {bridge}", must_work=False)
        signal.signal(signal.SIGTERM, before)


def _join(name: str, bridge: str, outside: str, rank: int, link_mbit: float) -> None:
    """One namespace on the bridge."""
    limit = f"root tbf rate {link_mbit:.3f}mbit burst {BURST_BYTES} limit {_QUEUE}"
    _run(f"ip netns add {name}")
    _run(f"ip link add {outside} type veth peer name {_INSIDE} netns {name}")
    _run(f"ip link set {outside} master {bridge} up")
    _run(f"ip -n {name} addr add 10.231.{rank // 250}.{rank % 250 + 1}/16 dev {_INSIDE}")
    _run(f"ip -n {name} link set {_INSIDE} up")
    _run(f"ip -n {name} link set lo up")
    _run(f"tc qdisc add dev {outside} {limit}")
    _run(f"ip netns exec {name} tc qdisc add dev {_INSIDE} {limit}")


def _run(command: str, *, must_work: bool = True) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if must_work and done.returncode != 0:
        problem = f"`{command}` failed: {done.stderr.strip()}"
        raise UserError(
            problem, field="link_mbit", value=None, remedy="see whether the kernel has veth, bridge and tbf"
        )
