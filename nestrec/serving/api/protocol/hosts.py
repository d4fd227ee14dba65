"""Under which names a server may be asked.

A page of any web site can make its own name point to a loopback address, and then ask a server there as if it were its
own. A browser still tells the name that it was given: where nobody but this machine is served, a name is refused unless
it is this machine's.
"""

import ipaddress
from collections.abc import Sequence

_MOST_REMEMBERED = 1024


class HostNames:
    """Names that may stand in the header Host. Addresses may always: nobody can make them point elsewhere."""

    def __init__(self, listens_on: str, names: Sequence[str] = ()):
        """names: of this server, or `*`; none of them: any name, unless it listens on a loopback address."""
        self._names = {name.lower().rstrip(".") for name in (*names, listens_on, "localhost")}
        self._takes_any = "*" in names if names else not is_loopback(listens_on)
        self._known: dict[bytes, bool] = {}

    def __contains__(self, header: bytes) -> bool:
        is_known = self._known.get(header)
        if is_known is None:
            if len(self._known) >= _MOST_REMEMBERED:
                self._known.clear()
            is_known = self._known[header] = self._takes_any or self._is_ours(header.decode("latin-1"))
        return is_known

    def _is_ours(self, header: str) -> bool:
        name = _without_port(header.strip()).lower().rstrip(".")
        return name in self._names or name.endswith(".localhost") or _is_address(name)


def is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _without_port(header: str) -> str:
    if header.startswith("["):
        return header[1:].partition("]")[0]
    name, _, port = header.rpartition(":")
    return name if name and ":" not in name and port.isdigit() else header


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
