"""A link that is only timed: an exchange takes as long as its bytes would on it. For benchmarks.

Between real ranks the exchange is made and then held back. A process alone may stand for one rank of many that are all
like it: what would come from the others is then a copy of what would leave for them. Whatever prints figures measured
with it says "emulated".

A wait of a given time in the order of a thread's work. For benchmarks that emulate what is not there.

On a CPU the thread sleeps. On CUDA the stream waits, not the thread: the driver calls the C library's `usleep` between
two pieces of the stream's work, on a thread of its own. No kernel runs, so nothing is taken from the computation (on an
H200 matrix products beside such waits took what they took alone), and Python has no part in it. A wait takes 0.1 to 0.2
ms longer than asked for. The driver makes such calls one after another, so only one stream at a time should wait so.

Real links of a given bandwidth between ranks on one machine: network namespaces, veth pairs and a bridge.

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
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from nestrec.base.errors import UserError, require
from nestrec.distributed.topology import Communicator, Topology
from nestrec.distributed.transports import AllToAllPayload, Sizes, Transport


def wait_in_order(duration_s: float, device: torch.device) -> None:
    """What this thread does, or launches, next on the device comes this much later."""
    if device.type != "cuda":
        time.sleep(duration_s)
        return
    launch, usleep = _calls()
    stream = torch.cuda.current_stream(device).cuda_stream
    if (code := launch(stream, usleep, round(duration_s * 1e6))) != 0:
        raise RuntimeError(f"cuLaunchHostFunc failed with code {code}")


@lru_cache(maxsize=1)
def _calls() -> tuple[Any, Any]:
    launch = ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc
    # The argument of a host function is a pointer, which is passed as an integer is: usleep takes it for its own.
    launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    return launch, ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p)


@dataclass(frozen=True, slots=True)
class EmulatedLink:
    """A rank's link, each way."""

    mbit: float
    """megabits a second"""
    latency_us: float = 0.0
    """of an exchange, beside its bytes"""
    num_ranks: int = 1
    """ranks that a process alone stands for one of"""

    def hold(self, num_bytes: int, device: torch.device) -> None:
        """Wait for the time that these bytes take."""
        wait_in_order(self.latency_us * 1e-6 + num_bytes * 8e-6 / self.mbit, device)


class EmulatedTransport(Transport):
    """Forwards to another transport, then waits for the time that the bytes take on an emulated link."""

    def __init__(self, inner: Transport, link: EmulatedLink, communicator: Communicator) -> None:
        self._inner = inner
        self._link = link
        self._rank = communicator.rank
        self._size = communicator.size

    def all_to_all(self, into: torch.Tensor, sent: torch.Tensor, receive: Sizes, send: Sizes) -> None:
        self._inner.all_to_all(into, sent, receive, send)
        self._hold(receive, send, into.device)

    def exchange(self, shipment: AllToAllPayload) -> list[torch.Tensor]:
        pieces = self._inner.exchange(shipment)
        size = shipment.like.element_size()
        self._hold((shipment.receive * size).tolist(), (shipment.send * size).tolist(), shipment.like.device)
        return pieces

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._inner.all_reduce(tensor)
        # In a ring each rank sends, and receives, nearly twice the tensor.
        num_bytes = 2 * (self._size - 1) * tensor.numel() * tensor.element_size() // self._size
        self._link.hold(num_bytes, tensor.device)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        self._inner.broadcast(tensor, source)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return self._inner.all_gather(tensor)

    def _hold(self, receive: Sizes, send: Sizes, device: torch.device) -> None:
        """Waits for the larger direction; what a rank sends to itself does not cross the link."""
        sent_bytes = sum(send) - send[self._rank]
        received_bytes = sum(receive) - receive[self._rank]
        self._link.hold(max(sent_bytes, received_bytes), device)


class LoneTransport(Transport):
    """Stands for one of `link.num_ranks` ranks that are all alike: copies what a real exchange would bring."""

    def __init__(self, link: EmulatedLink) -> None:
        self._link = link

    def all_to_all(self, into: torch.Tensor, sent: torch.Tensor, receive: Sizes, send: Sizes) -> None:
        num_ranks = self._link.num_ranks
        self._link.hold(sent.numel() * sent.element_size() * (num_ranks - 1) // num_ranks, sent.device)
        into.copy_(sent)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Does nothing: the sum over one rank is its own tensor."""

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Does nothing: the only rank is the source."""

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor]


def with_emulated_links(topology: Topology, link: EmulatedLink) -> Topology:
    """Returns the same ranks, whose exchanges of keys, vectors, replicas and dense gradients pass emulated links."""
    return replace(
        topology,
        keys=_wrapped(topology.keys, link),
        vectors=_wrapped(topology.vectors, link),
        replicas=_wrapped(topology.replicas, link),
        dense=_wrapped(topology.dense, link),
    )


def _wrapped(communicator: Communicator, link: EmulatedLink) -> Communicator:
    if communicator.transport is not None:
        return replace(communicator, transport=EmulatedTransport(communicator.transport, link, communicator))
    return replace(communicator, transport=LoneTransport(link)) if link.num_ranks > 1 else communicator


# A bucket fills while ranks compute, and what it holds passes at no cost: a large one would make small exchanges free.
BURST_BYTES = 128 << 10
_QUEUE = "64mb"
_CLONE_NEWNET = 0x40000000
_INSIDE = "link0"


@dataclass(frozen=True, slots=True)
class RankNamespaces:
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
def limited_links(num_ranks: int, link_mbit: float) -> Iterator[RankNamespaces]:
    """Namespaces of `num_ranks` ranks, joined by links of `link_mbit` megabits a second each way."""
    remedy = "run as root where `ip` and `tc` exist, or measure without limits (link_mbit=0)"
    require(can_limit(), "needs network namespaces", option="link_mbit", value=link_mbit, remedy=remedy)
    tag = f"{os.getpid():x}"
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # or nothing would be removed
    names = tuple(f"nestrec-{tag}-{rank}" for rank in range(num_ranks))
    bridge = f"nr{tag}b"
    try:
        _run(f"ip link add {bridge} type bridge")
        _run(f"ip link set {bridge} up")
        for rank, name in enumerate(names):
            _join(name, bridge, f"nr{tag}.{rank}", rank, link_mbit)
        yield RankNamespaces(names)
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
            problem, option="link_mbit", value=None, remedy="see whether the kernel has veth, bridge and tbf"
        )
