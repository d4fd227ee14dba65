"""Links of a given bandwidth for benchmarks: emulated links, and rate-limited links between ranks on one machine.

**Emulated links** (`EmulatedLink`) only take time: an exchange lasts as long as its bytes would take on the link.
Between real ranks, the exchange is performed and then delayed. A single process can also represent one of several
identical ranks; the data that it would receive from the others is then a copy of the data that it would send to them.
Figures that are measured with emulated links are marked as "emulated".

The waits are in the order of a thread's work (`wait_in_order`). On a CPU, the thread sleeps. On CUDA, the stream waits
and not the thread: the driver calls `usleep` of the C library on its own thread, between two operations of the stream.
No kernel runs, so that the computation is not slowed down (on an H200, matrix products took the same time with and
without such waits), and Python is not involved. A wait takes 0.1 to 0.2 ms longer than requested. The driver runs these
calls one after another, so that only one stream at a time should wait.

**Rate-limited links** (`limited_links`) are real: network namespaces, veth pairs and a bridge. Each rank runs in its
own namespace; a token bucket at each end of its link limits the rate to `link_mbit` in each direction. The queue is
long (64 MB), because a short one drops packets and stalls TCP. Root is required. The names of namespaces, links and
bridge contain the process id, and all of them are removed at the end, also after an error.
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
    """Delay the next work of this thread on a CPU, or of its current stream on a GPU."""
    if device.type != "cuda":
        time.sleep(duration_s)
        return
    launch, usleep = _driver_calls()
    stream = torch.cuda.current_stream(device).cuda_stream
    if (code := launch(stream, usleep, round(duration_s * 1e6))) != 0:
        raise RuntimeError(f"cuLaunchHostFunc failed with code {code}")


@lru_cache(maxsize=1)
def _driver_calls() -> tuple[Any, Any]:
    launch = ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc
    # The argument of a host function is a pointer. It is passed like an integer, so that usleep can read it as one.
    launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    return launch, ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p)


@dataclass(frozen=True, slots=True)
class EmulatedLink:
    """Emulated full-duplex link of a rank."""

    mbit: float
    """Bandwidth in megabits per second, in each direction."""
    latency_us: float = 0.0
    """Latency of an exchange in microseconds, in addition to the transfer time of its bytes."""
    num_ranks: int = 1
    """Number of emulated ranks, one of which a single process represents."""

    def hold(self, num_bytes: int, device: torch.device) -> None:
        """Wait for the transfer time of these bytes."""
        wait_in_order(self.latency_us * 1e-6 + num_bytes * 8e-6 / self.mbit, device)


class EmulatedTransport(Transport):
    """Transport that forwards to another one, and then waits for the transfer time on an emulated link."""

    def __init__(self, inner: Transport, link: EmulatedLink, communicator: Communicator) -> None:
        self._inner = inner
        self._link = link
        self._rank = communicator.rank
        self._size = communicator.size

    def all_to_all(self, into: torch.Tensor, sent: torch.Tensor, receive: Sizes, send: Sizes) -> None:
        self._inner.all_to_all(into, sent, receive, send)
        self._hold(receive, send, into.device)

    def exchange(self, payload: AllToAllPayload) -> list[torch.Tensor]:
        received = self._inner.exchange(payload)
        size = payload.like.element_size()
        self._hold((payload.receive * size).tolist(), (payload.send * size).tolist(), payload.like.device)
        return received

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._inner.all_reduce(tensor)
        # In a ring, each rank sends and receives nearly twice the size of the tensor.
        num_bytes = 2 * (self._size - 1) * tensor.numel() * tensor.element_size() // self._size
        self._link.hold(num_bytes, tensor.device)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        self._inner.broadcast(tensor, source)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return self._inner.all_gather(tensor)

    def _hold(self, receive: Sizes, send: Sizes, device: torch.device) -> None:
        """Wait for the direction with more bytes; bytes that a rank sends to itself do not cross the link."""
        sent_bytes = sum(send) - send[self._rank]
        received_bytes = sum(receive) - receive[self._rank]
        self._link.hold(max(sent_bytes, received_bytes), device)


class LoneTransport(Transport):
    """Transport of a single process that represents one of `link.num_ranks` identical ranks.

    The received data is a copy of the sent data.
    """

    def __init__(self, link: EmulatedLink) -> None:
        self._link = link

    def all_to_all(self, into: torch.Tensor, sent: torch.Tensor, receive: Sizes, send: Sizes) -> None:
        num_ranks = self._link.num_ranks
        self._link.hold(sent.numel() * sent.element_size() * (num_ranks - 1) // num_ranks, sent.device)
        into.copy_(sent)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Do nothing: the sum over one rank is its own tensor."""

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Do nothing: the only rank is the source."""

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor]


def with_emulated_links(topology: Topology, link: EmulatedLink) -> Topology:
    """Return a topology whose exchanges of keys, vectors, replicas and dense gradients use emulated links."""
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


# The token bucket fills while ranks compute, and the bytes that it covers are not delayed. A large bucket would make
# small exchanges free.
BURST_BYTES = 128 << 10
_QUEUE = "64mb"
_CLONE_NEWNET = 0x40000000
_INSIDE = "link0"


@dataclass(frozen=True, slots=True)
class RankNamespaces:
    """Network namespaces of the ranks."""

    namespaces: tuple[str, ...]

    def enter(self, rank: int) -> None:
        """Move this process into the namespace of a rank. It must not have open sockets or other threads yet."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.namespaces[rank]}") as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "cannot enter the network namespace")
        os.environ["GLOO_SOCKET_IFNAME"] = _INSIDE


def can_limit() -> bool:
    """Return whether this process can create rate-limited links: it runs as root, and `ip` and `tc` are installed."""
    return os.geteuid() == 0 and shutil.which("ip") is not None and shutil.which("tc") is not None


def bytes_on_link() -> int:
    """Return the number of bytes that this process has sent over its rate-limited link; 0 outside a namespace."""
    path = Path("/proc/self/net/dev")
    for line in path.read_text().splitlines() if path.exists() else []:
        name, _, counters = line.partition(":")
        if name.strip() == _INSIDE:
            return int(counters.split()[8])
    return 0


@contextlib.contextmanager
def limited_links(num_ranks: int, link_mbit: float) -> Iterator[RankNamespaces]:
    """Create the network namespaces of ranks, connected by rate-limited links.

    Args:
        num_ranks: Number of ranks.
        link_mbit: Bandwidth of each link in megabits per second, in each direction.

    Yields:
        The namespaces, which are removed afterwards.
    """
    problem = "network namespaces are not available to this process"
    remedy = "run as root with `ip` and `tc` installed, or measure without limits (link_mbit=0)"
    require(can_limit(), problem, option="link_mbit", value=link_mbit, remedy=remedy)
    tag = f"{os.getpid():x}"
    # SIGTERM must raise, so that the `finally` clause removes the namespaces and links.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
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
    """Create the namespace of a rank, and connect it to the bridge."""
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
        remedy = "check that the kernel supports veth, bridge and tbf"
        raise UserError(problem, option="link_mbit", value=None, remedy=remedy)
