"""Changes that count when every instance has made them, since each remembers and knows things by itself."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from nestrec.serving.many.probes import Probes
from nestrec.serving.many.upstream import Response, Upstream


@dataclass(frozen=True, slots=True)
class Change:
    """What is to be done, and when an instance has done it."""

    timeout_s: float
    """that an instance may take"""
    is_done_by_end: bool
    """a process that has ended has done it: what is to be forgotten ended with it. Not what is to be known: the next
    process of the instance begins without it"""


class AllInstances:
    """All instances of a front."""

    def __init__(self, upstreams: Sequence[Upstream], probes: Probes):
        """upstreams: of the slots, as they are at any time."""
        self._upstreams, self._probes = upstreams, probes

    async def make(self, change: Change, method: str, target: bytes, body: bytes = b"") -> Response | None:
        """The answer of the one that likes it least; none where an instance may not have done it."""
        slots = range(len(self._upstreams))
        responses = await asyncio.gather(*(self._made(change, slot, method, target, body) for slot in slots))
        heard = [response for response in responses if response is not None]
        return max(heard, key=lambda response: response.status) if len(heard) == len(slots) else None

    async def _made(self, change: Change, slot: int, method: str, target: bytes, body: bytes) -> Response | None:
        try:
            return await self._upstreams[slot].send(method, target, body, timeout_s=change.timeout_s)
        except ConnectionRefusedError:  # there is no process
            self._probes.lost(slot)
            return Response(204, {}, b"") if change.is_done_by_end else None
        except (OSError, EOFError):  # it may have done it, and only not have said so
            self._probes.begin(slot)
            return None
