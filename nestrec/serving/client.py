"""Whom a request comes from, so that the device's time is shared among those who ask.

A front on this machine names its client in the header X-Nestrec-Client; of anybody else the address counts, which
nobody can make up.
"""

from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass

HEADER = b"x-nestrec-client"
_MOST_CHARACTERS = 64


@dataclass(frozen=True, slots=True)
class Sender:
    """Of one request."""

    client: str = ""
    num_bytes: int = 0
    """of its body; 0 where nobody knows"""
    began_s: float = 0.0
    """`perf_counter` when all of it had come, which all processes share; 0 where nobody knows"""
    back_s: float = 0.0
    """for which the last answer that its front has got was on its way back from an engine"""


NOBODY = Sender()
current_sender: ContextVar[Sender] = ContextVar("nestrec_sender", default=NOBODY)
"""of the request that this task serves"""


def client_of(address: str, headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The client of a request that came from an address."""
    if address == "127.0.0.1" or address.startswith("::"):
        for name, value in headers:
            if name == HEADER:
                return value[:_MOST_CHARACTERS].decode("latin-1")
    return address
