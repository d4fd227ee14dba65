"""Random walk of a synthetic user through the catalog, with counter-based randomness, so that users are independent.

Items are popularity ranks 0..N-1. Rank r belongs to topic r mod K and is the (r div K)-th item of its topic. Within a
topic, each run of `BLOCK` items of similar popularity has two cycles. A sequence model can learn to follow a cycle, a
popularity model cannot; and because a cycle stays among items of similar popularity, the overall popularity
distribution is preserved. The cycle that a user prefers (the dialect) and the topics they like must be inferred from
history.

A user with several interests alternates between them: the next item follows from the last item of its interest, which
is often not the last item of the user. Co-occurrence counts of adjacent items cannot capture that; attention can.
"""

import math
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nestrec.base.random import mix64_jit

BLOCK = 32
NUM_LIKED = 3
"""Number of topics that a user likes; a topic may be drawn twice."""
CLICK, LIKE, LONG_VIEW = 1, 2, 64
_SESSION_START_CHANCE = 0.05
_TIE_CHANCE = 0.05
_MAX_ATTEMPTS = 16


@njit(cache=True, nogil=True)
def uniform(key: np.uint64, counter: int) -> float:
    """Return a number in [0, 1) that is a function of (key, counter)."""
    return float(mix64_jit(key ^ mix64_jit(np.uint64(counter))) >> np.uint64(11)) * 2.0**-53


@njit(cache=True, nogil=True)
def permute(index: int, size: int, key: np.uint64) -> np.int64:
    """Apply a bijection on [0, size): mix on the next power of two, and repeat until the result is inside."""
    bits = 1
    while (1 << bits) < size:
        bits += 1
    mask = np.uint64((1 << bits) - 1)
    shift = np.uint64(bits // 2 + 1)
    x = np.uint64(index)
    while True:
        for step in range(3):
            x = (x + mix64_jit(key + np.uint64(step))) & mask
            x = (x * (mix64_jit(key + np.uint64(16 + step)) | np.uint64(1))) & mask
            x ^= x >> shift
        if x < np.uint64(size):
            return np.int64(x)


@njit(cache=True, nogil=True)
def successor(rank: int, dialect: int, num_items: int, num_topics: int, key: np.uint64) -> int:
    """Return the item after `rank` on a cycle of its block, a full-period linear congruential generator."""
    topic = rank % num_topics
    index = rank // num_topics
    num_in_topic = (num_items - topic + num_topics - 1) // num_topics
    block = index // BLOCK
    size = min(BLOCK, num_in_topic - block * BLOCK)
    bits = mix64_jit(key ^ mix64_jit(np.uint64((block * num_topics + topic) * 2 + dialect)))
    multiplier = int(bits & np.uint64(7)) * 4 + 1
    increment = int((bits >> np.uint64(8)) & np.uint64(15)) * 2 + 1
    index_in_block = (multiplier * (index % BLOCK) + increment) % BLOCK
    while index_in_block >= size:
        index_in_block = (multiplier * index_in_block + increment) % BLOCK
    return (block * BLOCK + index_in_block) * num_topics + topic


@njit(cache=True, nogil=True)
def draw_rank(u: float, topic: int, num_items: int, num_topics: int, law: tuple[float, float]) -> int:
    """Draw a rank of `topic` from the continuous Zipf-Mandelbrot law p(r) ~ (r + q)^-s by inversion, s != 1."""
    zipf_s, zipf_q = law
    power = 1.0 - zipf_s
    low, high = (1.0 + zipf_q) ** power, (num_items + 1.0 + zipf_q) ** power
    index = int((low + u * (high - low)) ** (1.0 / power) - 1.0 - zipf_q) // num_topics
    num_in_topic = (num_items - topic + num_topics - 1) // num_topics
    return min(max(index, 0), num_in_topic - 1) * num_topics + topic


@njit(cache=True, nogil=True)
def walk(  # noqa: PLR0917
    keys: NDArray[np.uint64],
    offsets: NDArray[np.int64],
    shape: tuple[int, int, np.uint64],
    interests: tuple[int, float],
    law: tuple[float, float],
    follow_chances: tuple[float, float, float],
    start_ms: int,
    span_ms: int,
    last_user_of_rank: NDArray[np.int32],
    ranks: NDArray[np.int64],
    times_ms: NDArray[np.int64],
    actions: NDArray[np.int32],
) -> None:
    """Fill `ranks`, `times_ms` and `actions` with the events of the users with these keys.

    Args:
        keys: Random generator key of each user.
        offsets: Offsets of the users' events.
        shape: Number of items, number of topics, catalog key.
        interests: Number of interests, and the probability of switching to the next one.
        law: Zipf-Mandelbrot s and q.
        follow_chances: Probabilities of following a cycle, of choosing the preferred one of the two, and of staying in
            the topic otherwise.
        start_ms: Start of the time range in Unix milliseconds.
        span_ms: Range of the first events' times in milliseconds.
        last_user_of_rank: Zeros, used to prevent repetitions; empty to allow them.
        ranks: Output, popularity rank of each event.
        times_ms: Output, time of each event in Unix milliseconds.
        actions: Output, action bits of each event.
    """
    num_topics, catalog_key = shape[1], shape[2]
    liked = np.zeros(NUM_LIKED, dtype=np.int64)
    for user in range(keys.size):
        key = keys[user]
        for k in range(NUM_LIKED):
            liked[k] = int(uniform(key, 1 + k) * num_topics)
        dialect = int(uniform(key, 4) * 2)
        last_items = np.full(interests[0], -1, dtype=np.int64)  # the last item of each interest
        interest = 0
        time_ms = start_ms + int(uniform(key, 5) * span_ms)
        for event in range(offsets[user], offsets[user + 1]):
            counter = 64 + (event - offsets[user]) * 64
            if uniform(key, counter + 58) < interests[1]:
                interest = (interest + 1) % interests[0]
            rank, is_followed = _next_rank(
                key, counter, last_items[interest], dialect, liked, shape, law, follow_chances, last_user_of_rank, user
            )
            if last_user_of_rank.size:
                last_user_of_rank[rank] = user + 1
            time_ms += _gap_ms(key, counter)
            last_items[interest] = rank
            ranks[event] = rank
            times_ms[event] = time_ms
            actions[event] = _feedback(key, counter, rank, liked, is_followed, num_topics, catalog_key)


@njit(cache=True, nogil=True)
def _next_rank(key, counter, rank, dialect, liked, shape, law, follow_chances, last_user_of_rank, user) -> Any:  # type: ignore[no-untyped-def]  # noqa: PLR0917
    num_items, num_topics, catalog_key = shape
    follow_chance, dialect_chance, stay_chance = follow_chances
    candidate = 0
    for attempt in range(_MAX_ATTEMPTS):
        base = counter + 3 * attempt
        u = uniform(key, base)
        is_followed = rank >= 0 and attempt < 2 and u < follow_chance
        if is_followed:
            chosen = dialect if uniform(key, base + 1) < dialect_chance else 1 - dialect
            candidate = successor(rank, chosen, num_items, num_topics, catalog_key)
        else:
            v = uniform(key, base + 1)
            if rank >= 0 and v < stay_chance:
                topic = rank % num_topics
            elif v < stay_chance + (1 - stay_chance) * 0.8:
                topic = liked[int(v * 1e6) % NUM_LIKED]
            else:
                topic = int(v * 1e6) % num_topics
            candidate = draw_rank(uniform(key, base + 2), topic, num_items, num_topics, law)
        if not last_user_of_rank.size or last_user_of_rank[candidate] != user + 1:
            break
    return candidate, is_followed


@njit(cache=True, nogil=True)
def _gap_ms(key, counter) -> int:  # type: ignore[no-untyped-def]
    """Return the time to the next event: mostly about a minute within a session, sometimes 0, occasionally days."""
    u = uniform(key, counter + 56)
    scale_ms = 2.0 * 86_400_000 if uniform(key, counter + 57) < _SESSION_START_CHANCE else 60_000.0
    if u < _TIE_CHANCE:
        return 0
    return int(-math.log(1.0 - u) * scale_ms)


@njit(cache=True, nogil=True)
def _feedback(key, counter, rank, liked, is_followed, num_topics, catalog_key) -> int:  # type: ignore[no-untyped-def]  # noqa: PLR0917
    """Return action bits; likelier for a liked topic, after a followed cycle, and for an item of high quality."""
    match = 1.0 if is_followed else 0.0
    for k in range(NUM_LIKED):
        if liked[k] == rank % num_topics:
            match += 1.5
            break
    quality = uniform(catalog_key, 1_000_003 + rank) - 0.5
    taste = match + 2.0 * quality
    bits = 0
    if uniform(key, counter + 60) < 1.0 / (1.0 + math.exp(1.2 - taste)):
        bits |= CLICK
        if uniform(key, counter + 61) < 1.0 / (1.0 + math.exp(1.0 - taste)):
            bits |= LONG_VIEW
        if uniform(key, counter + 62) < 1.0 / (1.0 + math.exp(4.0 - taste)):
            bits |= LIKE
    return bits
