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
"""no user's id is read as this: `user_of` hands on none that begins so"""


def slot_address(slot: int) -> str:
    """Whatever stands for a user where one slot and no other is meant."""
    return f"{_ADDRESS}{slot}"


def ring_of(secret: bytes, num_slots: int) -> tuple[KeyedHash, Ring]:
    keyed = KeyedHash(secret)
    return keyed, Ring.make(num_slots, keyed)


def ranked_slots(keyed: KeyedHash, ring: Ring, user: str, is_alive: Sequence[bool]) -> list[int]:
    """The user's slot and, in order, those it would be with that one gone."""
    place = keyed.number("user", user)
    alive = list(is_alive)
    slots = list[int]()
    while (route := slot_for(ring, place, [0] * len(alive), alive, bound=2.0)) is not None:
        slots.append(route.slot)
        alive[route.slot] = False
    return slots


class SlotRouter(RequestRouter):  # type: ignore[misc]
    """The first argument of a call is the user, or `slot_address` of the slot that is meant."""

    def initialize_state(self, *, secret: str, num_slots: int) -> None:
        self._keyed, self._ring = ring_of(bytes.fromhex(secret), num_slots)
        self._num_slots = num_slots

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The user's replica; the next one where that refuses because it is full, which is then counted as a leak."""
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
