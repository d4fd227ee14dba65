"""Which connections may stay open, and which give way where there is no room for another.

A connection without a complete request gives way to a new one: first of those that have never asked anything, then of
those that are kept for a next request, and of the address that has most of them. So many silent sockets cost those who
ask nothing. One that is being answered never gives way.
"""

import ipaddress
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Connection = TypeVar("Connection")
_PREFIX_BITS = 64
"""of an IPv6 address: whoever has one usually has all that begin like it"""


@dataclass(slots=True)
class _Address(Generic[Connection]):
    num_open: int = 0
    silent: OrderedDict[Connection, None] = field(default_factory=OrderedDict)
    """that have not asked anything yet, oldest first"""
    kept: OrderedDict[Connection, None] = field(default_factory=OrderedDict)
    """that wait for another request, longest idle first"""


class Connections(Generic[Connection]):
    """Open connections by address. Used inside one event loop."""

    def __init__(self, most: int, most_an_address: int):
        self.most, self.most_an_address = most, most_an_address
        self._addresses: dict[str, _Address[Connection]] = {}
        self._open: dict[Connection, str] = {}

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, connection: Connection, address: str) -> Connection | None:
        """A new connection; the one that gives way to it, which is itself where nobody can; none where there is room.

        Whoever gives way counts as closed.
        """
        own = self._addresses.setdefault(address, _Address())
        own.num_open += 1
        self._open[connection] = address
        gives_way: Connection | None = None
        if own.num_open > self.most_an_address:
            gives_way = _longest_idle(own) or connection
        elif len(self._open) > self.most:
            gives_way = self._longest_idle_of_all() or connection
        own.silent[connection] = None
        if gives_way is not None and gives_way is not connection:
            self.closed(gives_way)
        return gives_way

    def began(self, connection: Connection) -> None:
        """A complete request is there: from now on it is being answered."""
        self._leaves(connection)

    def ended(self, connection: Connection) -> None:
        """All that it asked for is answered."""
        if connection in self._open:
            self._addresses[self._open[connection]].kept[connection] = None

    def closed(self, connection: Connection) -> None:
        own = self._leaves(connection)
        if own is not None:
            own.num_open -= 1
            address = self._open.pop(connection)
            if own.num_open == 0:
                del self._addresses[address]

    def _leaves(self, connection: Connection) -> _Address[Connection] | None:
        """It is not idle any more; its address, none where it has given way before."""
        if connection not in self._open:
            return None
        own = self._addresses[self._open[connection]]
        own.silent.pop(connection, None)
        own.kept.pop(connection, None)
        return own

    def _longest_idle_of_all(self) -> Connection | None:
        everyone = self._addresses.values()
        most_silent = max(everyone, key=lambda address: len(address.silent))
        if most_silent.silent:
            return next(iter(most_silent.silent))
        return _longest_idle(max(everyone, key=lambda address: len(address.kept)))


def _longest_idle(address: _Address[Connection]) -> Connection | None:
    return next(iter(address.silent or address.kept), None)


def address_of(peer: tuple[str, int] | None) -> str:
    """Whom a connection comes from; empty where nobody can tell (a socket of this machine without an address)."""
    if peer is None:
        return ""
    if ":" not in peer[0]:
        return peer[0]
    try:
        address = ipaddress.IPv6Address(peer[0].partition("%")[0])
    except ValueError:
        return peer[0]
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address), _PREFIX_BITS), strict=False))
