"""Routes users to slots by consistent hashing with bounded loads and keyed hashes.

Keyed hashes over tagged fields: nobody outside can aim at a slot, and no two lists of fields read the same.

Which instance serves a user: consistent hashing with bounded loads over stable slots.

`slot_for` is the whole policy, a pure function: the first living slot clockwise of the user's place on the ring whose
load is below `bound` times the mean. Slots are numbers that outlive the instances in them, so a replaced instance takes
the users of its slot back and no others move. `Router` adds what must be remembered: the pre-infer signal and the
ranking request of a user take the same way even when loads change in between.
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
    """BLAKE2b under a secret; a new secret for each process unless one is given."""

    def __init__(self, secret: bytes | None = None):
        self._secret = secret or secrets.token_bytes(32)

    def digest(self, purpose: str, *fields: Field) -> bytes:
        """16 bytes of (purpose, fields); type and length of each field take part."""
        state = blake2b(digest_size=16, key=self._secret, person=purpose.encode()[:16])
        for field in fields:
            tag, content = _encoded(field)
            state.update(tag + len(content).to_bytes(8, "little"))
            state.update(content)
        return state.digest()

    def number(self, purpose: str, *fields: Field) -> int:
        """64 bits of the digest."""
        return int.from_bytes(self.digest(purpose, *fields)[:8], "little")


def _encoded(field: Field) -> tuple[bytes, bytes]:
    if isinstance(field, str):
        return b"s", field.encode("utf-8", "surrogatepass")
    if isinstance(field, int):
        return b"i", str(field).encode()
    return b"b", field


@dataclass(frozen=True, slots=True)
class Ring:
    """Places of the slots on the circle of 64-bit numbers, in order."""

    places: tuple[int, ...]
    slots: tuple[int, ...]

    @staticmethod
    def make(num_slots: int, keyed: KeyedHash, places_a_slot: int = 64) -> "Ring":
        pairs = sorted(
            (keyed.number("ring", slot, place), slot) for slot in range(num_slots) for place in range(places_a_slot)
        )
        return Ring(tuple(place for place, _ in pairs), tuple(slot for _, slot in pairs))

    def home(self, place: int) -> int:
        """The slot of a user at `place` where all are alive and none is at its bound."""
        return self.slots[bisect_right(self.places, place) % len(self.slots)]


@dataclass(frozen=True, slots=True)
class Route:
    slot: int
    is_diverted: bool
    """not the user's first living slot: that one was at its bound"""


def slot_for(
    ring: Ring, place: int, loads: Sequence[int], is_alive: Sequence[bool], *, bound: float, free_load: int = 1
) -> Route | None:
    """The slot of a user at `place`; none where no slot is alive.

    loads: requests under way at each slot. With `bound` > 1 some living slot is always below it. free_load: requests
    that a slot takes whatever the others do: a few at once are no sign of load, and a user's cache is worth more.
    """
    num_alive = sum(is_alive)
    if num_alive == 0:
        return None
    total = sum(load for load, alive in zip(loads, is_alive, strict=True) if alive)
    most = max(free_load, math.ceil(bound * (total + 1) / num_alive))
    start = bisect_right(ring.places, place)
    first = None
    for step in range(len(ring.slots)):
        slot = ring.slots[(start + step) % len(ring.slots)]
        if not is_alive[slot]:
            continue
        first = slot if first is None else first
        if loads[slot] + 1 <= most:
            return Route(slot, slot != first)
    assert first is not None
    return Route(first, False)


class Router:
    """Routes of users over time, under one lock of the caller."""

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
        """what each slot serves: where they differ, a user meets no other version than that of its own slot"""
        self._chosen: OrderedDict[bytes, tuple[Route, float]] = OrderedDict()
        self.num_diverted = 0
        self.num_leaked = 0
        """ranking requests whose pre-infer went to a slot that has died since"""

    def begin(self, user: str, *, at_home: bool = False) -> Route | None:
        """The way of a request of this user, counted as under way until `end`; none where nothing is alive.

        at_home: only the user's own slot will do, whatever its load; none where that is not alive.
        """
        if self._num_slots == 1:
            return self._begin_at_the_only_one()
        now_s = self._clock.now_s()
        self._forget(now_s)
        hashed = self._keyed.digest("user", user)
        if at_home:
            return self._begin_at_home(int.from_bytes(hashed[:8], "little"))
        route, _ = self._chosen.get(hashed, (None, 0.0))
        place = int.from_bytes(hashed[:8], "little")
        is_open = self._open_to(place)
        if route is None or not is_open[route.slot]:
            self.num_leaked += route is not None
            route = slot_for(self._ring, place, self.loads, is_open, bound=self._bound, free_load=self._free_load)
            if route is None:
                return None
            self.num_diverted += route.is_diverted
            self._chosen.pop(hashed, None)
            self._chosen[hashed] = (route, now_s + self._sticky_s)
        self.loads[route.slot] += 1
        return route

    def _begin_at_the_only_one(self) -> Route | None:
        """There is nothing to choose, and nothing to remember."""
        if not self.is_alive[0]:
            return None
        self.loads[0] += 1
        return Route(0, False)

    def _begin_at_home(self, place: int) -> Route | None:
        slot = self._ring.home(place)
        if not self.is_alive[slot]:
            return None
        self.loads[slot] += 1
        return Route(slot, False)

    def _open_to(self, place: int) -> Sequence[bool]:
        """Living slots with the version of the user's own; any living one where there is none of them."""
        version = self.versions[self._ring.home(place)]
        if self.versions.count(version) == len(self.versions):
            return self.is_alive
        same = [is_alive and v == version for is_alive, v in zip(self.is_alive, self.versions, strict=True)]
        return same if any(same) else self.is_alive

    @property
    def num_slots(self) -> int:
        """Slots that users are sent to; `loads` and `is_alive` also have those that were removed."""
        return self._num_slots

    def resize(self, num_slots: int) -> None:
        """More slots, or fewer: users of the new ones come from all others, and those of the last ones go to all
        others; nobody else moves. Requests under way in slots that are gone end as they began."""
        self._ring = Ring.make(num_slots, self._keyed)
        self._num_slots = num_slots
        more = num_slots - len(self.loads)
        if more > 0:
            self.loads += [0] * more
            self.is_alive += [False] * more
            self.versions += [""] * more
        self.is_alive[num_slots:] = [False] * (len(self.is_alive) - num_slots)

    def end(self, slot: int) -> None:
        self.loads[slot] -= 1

    def set_alive(self, slot: int, is_alive: bool) -> None:
        """A slot that was taken away stays so, whatever its instance says while it ends."""
        self.is_alive[slot] = is_alive and slot < self._num_slots

    def _forget(self, now_s: float) -> None:
        while self._chosen:
            hashed, (_, until_s) = next(iter(self._chosen.items()))
            if until_s > now_s:
                return
            del self._chosen[hashed]
