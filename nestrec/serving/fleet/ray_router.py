"""Chooses Ray Serve replicas by consistent hashing with bounded loads over stable slots.

The slot of a replica is its rank, which a replacement takes over, so only the users of a lost replica move, and they
return later. Ray imports `SlotRouter` by its name; it runs wherever a handle is used.
"""

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from nestrec.serving.core.slot_router import KeyedHash, Ring, slot_for

SLOT = "nestrec_slot"
_ADDRESS = "\0slot "
"""Prefix of a slot address; the ingress strips leading NUL characters from user ids, so that none starts with it."""


def slot_address(slot: int) -> str:
    """Return the value to pass instead of a user id to address a specific slot."""
    return f"{_ADDRESS}{slot}"


def ring_of(secret: bytes, num_slots: int) -> tuple[KeyedHash, Ring]:
    """Return the keyed hash and the consistent-hashing ring that all routers and replicas share."""
    keyed = KeyedHash(secret)
    return keyed, Ring.make(num_slots, keyed)


def ranked_slots(keyed: KeyedHash, ring: Ring, user: str, is_alive: Sequence[bool]) -> list[int]:
    """Return the user's slot, followed by its fallback slots in order."""
    position = keyed.number("user", user)
    alive = list(is_alive)
    slots = list[int]()
    while (route := slot_for(ring, position, [0] * len(alive), alive, bound=2.0)) is not None:
        slots.append(route.slot)
        alive[route.slot] = False
    return slots


class SlotRouter(RequestRouter):  # type: ignore[misc]
    """Ray Serve request router with session affinity.

    The first argument of each call is the user id, or `slot_address` of a specific slot.
    """

    def initialize_state(self, *, secret: str, num_slots: int) -> None:
        self._keyed, self._ring = ring_of(bytes.fromhex(secret), num_slots)
        self._num_slots = num_slots

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the user's replica, followed by its fallbacks in case it rejects the request because it is full.

        A fallback counts such a request as misrouted.
        """
        by_slot: dict[int, Any] = {replica.replica_metadata[SLOT]: replica for replica in candidate_replicas}
        if pending_request is None or not by_slot:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        user = str(pending_request.args[0])
        if user.startswith(_ADDRESS):
            slot = int(user.removeprefix(_ADDRESS))
            return [[by_slot[slot]]] if slot in by_slot else []
        is_alive = [slot in by_slot for slot in range(self._num_slots)]
        slots = ranked_slots(self._keyed, self._ring, user, is_alive)
        return [[by_slot[slot]] for slot in slots]
