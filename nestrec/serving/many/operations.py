"""What a front is asked by whoever runs it: the endpoints under /v1/admin/, for all instances together."""

import asyncio
from dataclasses import dataclass
from typing import Annotated

from nestrec.base.bounds import Bound
from nestrec.serving.api.protocol.http import Answered, parse_json, problem
from nestrec.serving.api.requests import RollbackRequest, SwapRequest
from nestrec.serving.api.schema import LimitsConfig
from nestrec.serving.api.shapes import Least, reader
from nestrec.serving.many.rollout import Rollout

_MOST_INSTANCES = 1024
"""Largest number of instances of a front: a mistyped number must not use up the machine's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotDrainRequest:
    """An instance is to be left out, or taken in again."""

    slot: Annotated[int, Least(0)]
    """which"""
    drain: bool | None = None
    """false takes it in again; true where it is left out"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRequest:
    """More or fewer instances."""

    instances: Annotated[int, Bound(1, _MOST_INSTANCES)]
    """that are to serve"""


class Operations:
    """Reads requests and has them done; what was begun goes on where the client does not wait for it."""

    def __init__(self, rollout: Rollout, limits: LimitsConfig, drain_s: float):
        self._rollout, self._drain_s = rollout, drain_s
        self._read_swap, self._read_rollback = reader(SwapRequest, limits), reader(RollbackRequest, limits)
        self._read_drain, self._read_scale = reader(SlotDrainRequest, limits), reader(ScaleRequest, limits)
        self.under_way: set[asyncio.Task[Answered]] = set()

    async def answer(self, method: str, path: str, body: bytes) -> Answered:
        """Of a request to /v1/admin/."""
        if (method, path) == ("GET", "/v1/admin/fleet"):
            return await self._rollout.fleet()
        if method != "POST":
            return problem(405, "use POST", "", (b"allow", b"POST"))
        data = parse_json(body)
        match path:
            case "/v1/admin/swap":
                change = self._rollout.swap(self._read_swap(data).models)
            case "/v1/admin/rollback":
                self._read_rollback(data)
                change = self._rollout.rollback()
            case "/v1/admin/drain":
                wanted = self._read_drain(data)
                change = self._rollout.drain(wanted.slot, wanted.drain is not False)
            case "/v1/admin/scale":
                change = self._rollout.scale(self._read_scale(data).instances, self._drain_s)
            case _:
                return problem(404, "there is nothing here")
        task = asyncio.create_task(change)
        self.under_way.add(task)
        task.add_done_callback(self.under_way.discard)
        return await asyncio.shield(task)
