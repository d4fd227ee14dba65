"""Session affinity: routes users to slots by consistent hashing with bounded loads.

`slot_for` is the complete policy, a pure function: the first healthy slot clockwise of the user's position on the hash
ring whose load is below `bound` times the mean. Slots are stable numbers: a restarted instance gets the slot, and with
it the users, of the instance that it replaces, and no other user moves. `Router` adds the state: the pre-infer request
and the ranking request of a user go to the same slot even if loads change between them.

Hashes are keyed, so that clients cannot target a slot. Fields are encoded with type and length, so that different lists
of fields never have the same encoding.
"""

import math
import secrets
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from nestrec.base.clock import Clock

Field = str | bytes | int


class KeyedHash:
    """Keyed BLAKE2b hash; the secret is random per process unless one is passed."""

    def __init__(self, secret: bytes | None = None):
        self._secret = secret or secrets.token_bytes(32)

    def digest(self, purpose: str, *fields: Field) -> bytes:
        """Return the 16-byte digest of purpose and fields, including type and length of each field."""
        state = blake2b(digest_size=16, key=self._secret, person=purpose.encode()[:16])
        for field in fields:
            tag, content = _encode(field)
            state.update(tag + len(content).to_bytes(8, "little"))
            state.update(content)
        return state.digest()

    def number(self, purpose: str, *fields: Field) -> int:
        """Return the first 64 bits of the digest as an integer."""
        return int.from_bytes(self.digest(purpose, *fields)[:8], "little")


def _encode(field: Field) -> tuple[bytes, bytes]:
    if isinstance(field, str):
        return b"s", field.encode("utf-8", "surrogatepass")
    if isinstance(field, int):
        return b"i", str(field).encode()
    return b"b", field


@dataclass(frozen=True, slots=True)
class Ring:
    """Consistent-hashing ring: positions of the slots among the 64-bit integers, sorted, several per slot."""

    positions: tuple[int, ...]
    slots: tuple[int, ...]

    @staticmethod
    def make(num_slots: int, keyed: KeyedHash, positions_per_slot: int = 64) -> "Ring":
        pairs = sorted(
            (keyed.number("ring", slot, index), slot)
            for slot in range(num_slots)
            for index in range(positions_per_slot)
        )
        return Ring(tuple(position for position, _ in pairs), tuple(slot for _, slot in pairs))

    def home(self, position: int) -> int:
        """Return the home slot of a user: the one that serves the user if all slots are healthy and below the bound."""
        return self.slots[bisect_right(self.positions, position) % len(self.slots)]


@dataclass(frozen=True, slots=True)
class Route:
    """Slot chosen for a request."""

    slot: int
    is_diverted: bool
    """Whether the user's first healthy slot was at its load bound, so that the request goes to another slot."""


def slot_for(
    ring: Ring, position: int, loads: Sequence[int], is_alive: Sequence[bool], *, bound: float, free_load: int = 1
) -> Route | None:
    """Return the slot of a user, or None if no slot is healthy.

    Args:
        ring: Ring of all slots.
        position: Position of the user on the ring.
        loads: Number of requests in flight per slot.
        is_alive: Whether each slot is healthy.
        bound: Maximum load of a slot relative to the mean; above 1, at least one healthy slot is below its bound.
        free_load: Number of requests that a slot accepts regardless of the mean: a few concurrent requests do not
            indicate high load, and a hit in the prefix cache is worth more than balance.
    """
    num_alive = sum(is_alive)
    if num_alive == 0:
        return None
    total = sum(load for load, alive in zip(loads, is_alive, strict=True) if alive)
    max_load = max(free_load, math.ceil(bound * (total + 1) / num_alive))
    start = bisect_right(ring.positions, position)
    first = None
    for step in range(len(ring.slots)):
        slot = ring.slots[(start + step) % len(ring.slots)]
        if not is_alive[slot]:
            continue
        first = slot if first is None else first
        if loads[slot] + 1 <= max_load:
            return Route(slot, slot != first)
    assert first is not None
    return Route(first, False)


class Router:
    """Router with session affinity. Not thread-safe: the caller holds a lock."""

    def __init__(
        self,
        ring: Ring,
        keyed: KeyedHash,
        clock: Clock,
        *,
        bound: float = 1.25,
        free_load: int = 8,
        sticky_s: float = 2.0,
    ):
        self._ring = ring
        self._keyed = keyed
        self._clock = clock
        self._sticky_s = sticky_s
        self._bound = bound
        self._free_load = free_load
        self._num_slots = num_slots = max(ring.slots) + 1
        self.loads = [0] * num_slots
        self.is_alive = [True] * num_slots
        self.versions = [""] * num_slots
        """Model version of each slot; while they differ, users are only routed to slots that match their home slot."""
        self._chosen: OrderedDict[bytes, tuple[Route, float]] = OrderedDict()
        self.num_diverted = 0
        self.num_spilled = 0
        """Number of ranking requests whose pre-infer request went to a slot that has failed since."""

    def begin(self, user: str, *, home_only: bool = False) -> Route | None:
        """Route a request of a user and count it as in flight until `end`; return None if no slot is healthy.

        Args:
            user: User id.
            home_only: Whether only the user's home slot is acceptable, whatever its load.
        """
        if self._num_slots == 1:
            return self._begin_at_single_slot()
        now_s = self._clock.now_s()
        self._drop_expired(now_s)
        hashed = self._keyed.digest("user", user)
        if home_only:
            return self._begin_home_only(int.from_bytes(hashed[:8], "little"))
        route, _ = self._chosen.get(hashed, (None, 0.0))
        position = int.from_bytes(hashed[:8], "little")
        is_open = self._open_to(position)
        if route is None or not is_open[route.slot]:
            self.num_spilled += route is not None
            route = slot_for(self._ring, position, self.loads, is_open, bound=self._bound, free_load=self._free_load)
            if route is None:
                return None
            self.num_diverted += route.is_diverted
            self._chosen.pop(hashed, None)
            self._chosen[hashed] = (route, now_s + self._sticky_s)
        self.loads[route.slot] += 1
        return route

    def _begin_at_single_slot(self) -> Route | None:
        if not self.is_alive[0]:
            return None
        self.loads[0] += 1
        return Route(0, False)

    def _begin_home_only(self, position: int) -> Route | None:
        slot = self._ring.home(position)
        if not self.is_alive[slot]:
            return None
        self.loads[slot] += 1
        return Route(slot, False)

    def _open_to(self, position: int) -> Sequence[bool]:
        """Return the healthy slots with the model version of the user's home slot, or else all healthy slots."""
        version = self.versions[self._ring.home(position)]
        if self.versions.count(version) == len(self.versions):
            return self.is_alive
        same = [is_alive and v == version for is_alive, v in zip(self.is_alive, self.versions, strict=True)]
        return same if any(same) else self.is_alive

    @property
    def num_slots(self) -> int:
        """Number of slots that users are routed to; `loads` and `is_alive` also contain removed slots."""
        return self._num_slots

    def resize(self, num_slots: int) -> None:
        """Add slots at the end or remove the last ones.

        Users of a new slot come evenly from all others, users of a removed slot go evenly to all others, and no other
        user moves. Requests in flight in removed slots finish normally.
        """
        self._ring = Ring.make(num_slots, self._keyed)
        self._num_slots = num_slots
        num_new = num_slots - len(self.loads)
        if num_new > 0:
            self.loads += [0] * num_new
            self.is_alive += [False] * num_new
            self.versions += [""] * num_new
        self.is_alive[num_slots:] = [False] * (len(self.is_alive) - num_slots)

    def end(self, slot: int) -> None:
        self.loads[slot] -= 1

    def set_alive(self, slot: int, is_alive: bool) -> None:
        """Set the health of a slot; a removed slot stays unhealthy, whatever its instance reports while it stops."""
        self.is_alive[slot] = is_alive and slot < self._num_slots

    def _drop_expired(self, now_s: float) -> None:
        while self._chosen:
            hashed, (_, until_s) = next(iter(self._chosen.items()))
            if until_s > now_s:
                return
            del self._chosen[hashed]
