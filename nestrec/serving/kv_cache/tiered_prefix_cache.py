"""The tiered prefix cache: device pages, host memory, and copies between them.

Copies between device pages and DRAM on a thread of their own, and what they cost.

Each direction has a copier: a link carries both at once, and what comes back is waited for. On a GPU they also have a
stream of their own, so that batches go on beside them. A copy begins after the engine has
seen the end of whatever wrote its pages, and ends before the engine hears of it: no stream needs to wait for another.

The two tiers of prefixes of an engine: pages on the device, and DRAM behind them.

Used on the engine's thread; copies run on a thread of their own and report back through `post`.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

import torch

from nestrec.base.clock import Clock
from nestrec.base.config import config
from nestrec.base.config_values import Count, Natural, NonNegative
from nestrec.base.cuda import on_stream, side_stream
from nestrec.serving.core.background_tasks import FAILURES, guarded
from nestrec.serving.core.cost_model import EngineCostModel
from nestrec.serving.core.slot_router import KeyedHash
from nestrec.serving.inputs.engine_request import CacheKey, EngineRequest
from nestrec.serving.kv_cache.host_prefix_cache import HostCacheEntry, HostPages, HostPrefixCache
from nestrec.serving.kv_cache.kv_page_pool import PagePool, PrefixDtype, pool_for
from nestrec.serving.kv_cache.prefix_cache import Entry, PrefixCache
from nestrec.serving.model.model_adapter import ModelAdapter

_TASK = "nestrec-copier"
_SMOOTH = 0.1
_UNKNOWN_S = 1e-9


class Copier:
    """One copy after the other; `done` is called on the copier's thread, with whether the copy was made."""

    def __init__(self, device: torch.device) -> None:
        self._stream = side_stream(device)
        FAILURES.register(_TASK)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=_TASK)
        self._lock = threading.Lock()
        self._seconds_a_byte: float | None = None
        self._queued_bytes = 0

    def submit(self, copy: Callable[[], None], num_bytes: int, done: Callable[[bool], None]) -> None:
        def run() -> None:
            is_made = False
            try:
                self._make(copy, num_bytes)
                is_made = True
            except Exception as error:
                FAILURES.add(_TASK, error, "the prefix is forgotten")
            finally:  # works wait for it
                with self._lock:
                    self._queued_bytes -= num_bytes
                guarded(_TASK, lambda: done(is_made))  # the pool would keep an exception to itself

        with self._lock:
            self._queued_bytes += num_bytes
        self._pool.submit(run)

    def _make(self, copy: Callable[[], None], num_bytes: int) -> None:
        start_s = time.perf_counter()
        self._transfer(copy, num_bytes)
        seconds = (time.perf_counter() - start_s) / max(num_bytes, 1)
        with self._lock:
            known = self._seconds_a_byte
            self._seconds_a_byte = seconds if known is None else known + _SMOOTH * (seconds - known)

    def _transfer(self, copy: Callable[[], None], num_bytes: int) -> None:
        """Makes one copy and returns when it has ended; on the copier's thread."""
        with on_stream(self._stream):
            copy()

    def wait(self) -> None:
        """Return when the copies that were submitted have ended; called by the thread that submits them."""
        self._pool.submit(lambda: None).result()
        self._queued_bytes = 0  # also of one that could not be submitted

    def copy_s(self, num_bytes: int) -> float:
        """Expected seconds of a copy; before the first one, as of a slow link."""
        return num_bytes * (_UNKNOWN_S if self._seconds_a_byte is None else self._seconds_a_byte)

    def learn(self, copy: Callable[[], None], num_bytes: int) -> None:
        """Find out what copies cost by making two, of which the second counts. Whoever decides by an estimate whether a
        copy is worth it would otherwise never make the first, if the estimate is too high."""
        for _ in range(2):
            made: Future[bool] = Future()
            self._seconds_a_byte = None
            self.submit(copy, num_bytes, made.set_result)
            made.result()

    @property
    def wait_s(self) -> float:
        """Expected seconds of the copies that were begun and have not ended."""
        return self.copy_s(self._queued_bytes)

    def close(self) -> None:
        self._pool.shutdown()


def break_even_tokens(costs: EngineCostModel, copier: Copier, bytes_a_token: int, longest: int) -> int | None:
    """Prefixes from this length on are reloaded faster than computed again; none where none is."""
    for length in [1 << i for i in range(longest.bit_length() + 1)]:
        if copier.copy_s(length * bytes_a_token) < costs.predict_s(*costs.work(0, length, 0)):
            return length
    return None


_MOST_SPILL_WAIT_S = 0.1
_LEARNED_PAGES = 32
_FEW_NEW = 0.125
"""of a prefix: so much of it is sooner computed after a reload than copied with everything else at each visit"""
Post = Callable[[Callable[[], None]], None]


@config
class PrefixCacheConfig:
    cache_bytes: Natural = 1 << 30
    """device memory for prefixes of users: more of them are found when ranking comes"""
    dram_bytes: Natural = 1 << 30
    """host memory for prefixes that left the device; 0 keeps none"""
    cache_ttl_s: NonNegative = 600.0
    """life of a prefix on the device"""
    dram_ttl_s: NonNegative = 600.0
    """life of a prefix in DRAM"""
    spill_above: NonNegative = 0.5
    """prefixes are copied to DRAM where more than this share of the device's pages is in use"""
    page_tokens: Count = 64
    """tokens of a page, the unit in which memory for prefixes is given out: the last page of each is half empty"""
    keeps_prefix: bool = True
    """prefixes are stored and used; without it every request is computed in full"""
    keeps_on_device: bool = True
    """a prefix stays on the device after ranking; without it only DRAM keeps it"""
    reload: Literal["worth", "always"] = "worth"
    """what DRAM has comes back where that is sooner than computing it, or always"""


class TieredPrefixCache:
    """Finds, makes, keeps, spills and reloads the prefixes of works."""

    def __init__(
        self,
        form: ModelAdapter,
        cfg: PrefixCacheConfig,
        *,
        keyed: KeyedHash,
        clock: Clock,
        costs: EngineCostModel,
        post: Post,
        count: Callable[[str], None],
        pool: PagePool | None = None,
        prefix_dtype: PrefixDtype = "model",
        make_copier: Callable[[torch.device], Copier] = Copier,
    ):
        """pool: memory that exists already, of which at most `cfg.cache_bytes` are used.

        make_copier: makes the copier of each direction between device pages and host memory.
        """
        self.cfg = cfg
        self._costs = costs
        self._post = post
        self._count = count
        servable = form.servable
        self._longest = servable.encoder_config.max_length
        cache_bytes = cfg.cache_bytes if cfg.keeps_prefix else 0
        self.pool = pool or pool_for(
            servable, cache_bytes=cache_bytes, page_tokens=cfg.page_tokens, prefix_dtype=prefix_dtype
        )
        self.bytes_a_token = self.pool.token_bytes
        num_pages = min(max(1, cache_bytes // self.pool.page_bytes), self.pool.num_pages)
        self.num_bytes = num_pages * self.pool.page_bytes
        self.device = PrefixCache(
            num_pages=num_pages,
            page_tokens=self.pool.page_tokens,
            clock=clock,
            ttl_s=cfg.cache_ttl_s,
            bucket_of=lambda key: keyed.digest("slot", key.user, key.version, key.config),
        )
        self._host = HostPages(self.pool, max_bytes=cfg.dram_bytes if cfg.keeps_prefix else 0)
        self.dram: HostPrefixCache[list[int]] = HostPrefixCache(
            max_bytes=self._host.num_pages * self._host.page_bytes,
            ttl_s=cfg.dram_ttl_s,
            clock=clock,
            give=self._host.give,
        )
        self._out = make_copier(servable.device)
        self._in = make_copier(servable.device)
        self._reloading: dict[CacheKey, list[EngineRequest]] = {}
        self._num_clears = 0
        self._learn_copies(num_pages)

    def _learn_copies(self, num_pages: int) -> None:
        """What both directions cost, before anybody has to choose between them and computing."""
        held = self._host.take(min(_LEARNED_PAGES, num_pages, self._host.num_pages) * self._host.page_bytes)
        if held:
            pages = list(range(len(held)))
            num_bytes = len(held) * self._host.page_bytes
            self._out.learn(lambda: self._host.copy_out(pages, held), num_bytes)
            self._in.learn(lambda: self._host.copy_in(pages, held), num_bytes)
            self._host.give(held)

    def find(self, work: EngineRequest) -> Entry | None:
        """The prefix of a work on the device, without a pin; none while a copy of it is on its way, which `reload` then
        has the work wait for: pages that are written to have one writer."""
        if not self.cfg.keeps_prefix or work.tokens.num_cacheable == 0 or work.key in self._reloading:
            return None
        entry = self.device.find(work.key, work.content_of)
        if entry is not None and work.source == "none":
            work.source = "dram" if entry.is_reloaded else "device"
            entry.is_reloaded = entry.is_reloaded and not work.is_rank  # what a signal had brought back, ranking reads
        return entry

    def reserve(self, work: EngineRequest, entry: Entry | None, num_tokens: int) -> tuple[Entry | None, int]:
        """Pin the entry, or make one, with room for so many tokens; and how many tokens there is room for."""
        first = entry.length if entry is not None else 0
        if entry is not None:
            self.device.pin(entry)
        elif self.cfg.keeps_prefix and num_tokens:
            entry = self.device.create(work.key)
        has_room = entry is not None and self.device.grow(entry, num_tokens)
        return entry, num_tokens if has_room else first

    def drop(self, key: CacheKey) -> None:
        self.device.drop(key)
        self.dram.drop(key)

    def drop_stale(self, version: str, most: int) -> bool:
        """Forget some of what other versions than this one have computed; whether there may be more."""
        dropped = self.device.drop_oldest(lambda key: key.version != version, most)
        return dropped + self.dram.drop_oldest(lambda key: key.version != version, most) > 0

    def spill(self, entry: Entry, work: EngineRequest, *, ahead_s: float) -> None:
        """Copy the prefix of a work to DRAM where the device is getting full, or keeps nothing by itself.

        Only what would be worth a reload now and DRAM lacks a good part of, and not where the link is behind: what
        waits for it could not leave the device. What was forgotten while a batch computed with it stays forgotten.
        """
        if entry.is_dropped:
            return
        used = 1.0 - self.device.num_free_pages / self.device.num_pages
        stays = self.cfg.keeps_on_device
        if self.dram.max_bytes == 0 or entry.length == 0 or (stays and used <= self.cfg.spill_above):
            return
        num_bytes = self._host.bytes_of(entry.length)
        kept = None
        known = self.dram.find(entry.key, work.content_of)
        is_new = known is None or entry.length - known.length > _FEW_NEW * entry.length
        is_worth = is_new and self._is_copy_worth(entry.length, ahead_s, behind=0)
        if is_worth and self._out.wait_s <= _MOST_SPILL_WAIT_S:
            kept = self.dram.begin_spill(entry.key, length=entry.length, content=entry.content, num_bytes=num_bytes)
        if kept is not None:
            self.device.pin(entry)
            pages = list(entry.pages)
            held = self._host.take(num_bytes)
            finish = self._posted(lambda is_made: self._spilled(kept, entry, held, is_made))
            self._out.submit(lambda: self._host.copy_out(pages, held), num_bytes, finish)
        if not stays:
            self.device.drop(entry.key)

    def reload(
        self, work: EngineRequest, *, ahead_s: float, behind: int, resume: Callable[[EngineRequest], None]
    ) -> bool:
        """Begin, or join, a copy from DRAM where it is worth it; `resume` is called with the work at its end. What came
        back is held until the work is answered, or let go.

        ahead_s: device seconds until the prefix could be computed instead. behind: works that would wait for that.
        """
        if work.source == "dram" or not self.cfg.keeps_prefix:  # came back once already
            return False
        if work.key in self._reloading:
            self._reloading[work.key].append(work)
            return True
        kept = self.dram.find(work.key, work.content_of)
        if kept is None or kept.payload is None or not self._is_copy_worth(kept.length, ahead_s, behind):
            return False
        entry = self.device.create(work.key)
        if entry is None or not self.device.grow(entry, kept.length):
            if entry is not None:
                self.device.unpin(entry)
            return False
        self._reloading[work.key] = [work]
        self.dram.begin_reload(kept)
        pages = list(entry.pages)
        held = kept.payload
        finish = self._posted(lambda is_made: self._reloaded(kept, entry, resume, is_made))
        self._in.submit(lambda: self._host.copy_in(pages, held), kept.num_bytes, finish)
        return True

    def clear(self) -> None:
        """Forget every prefix and every work that waits for a copy, when the copies under way have ended.

        It relies on nothing that an exception may have left half changed, and frees all pages.
        """
        self._out.wait()
        self._in.wait()
        self._num_clears += 1
        self._reloading.clear()
        self.device.clear()
        self.dram.clear()
        self._host.clear()

    def _posted(self, finish: Callable[[bool], None]) -> Callable[[bool], None]:
        """Have `finish` called on the engine's thread, unless everything was forgotten meanwhile."""
        num_clears = self._num_clears

        def finish_if_known(is_made: bool) -> None:
            if self._num_clears == num_clears:
                finish(is_made)

        return lambda is_made: self._post(lambda: finish_if_known(is_made))

    def let_go(self, work: EngineRequest) -> None:
        """A work that is given up: what was computed or came back for it is not held for it any longer."""
        entry = self.find(work) if work.is_begun or work.source == "dram" else None
        if entry is not None:
            self.device.hold(entry, float("-inf"))

    def waiting(self) -> list[EngineRequest]:
        """Works that wait for a copy."""
        return [work for works in self._reloading.values() for work in works]

    def break_even_tokens(self) -> int | None:
        """Prefixes from this length on are reloaded from DRAM faster than computed."""
        return break_even_tokens(self._costs, self._in, self.bytes_a_token, self._longest)

    def close(self) -> None:
        self._out.close()
        self._in.close()

    def _is_copy_worth(self, length: int, ahead_s: float, behind: int) -> bool:
        """Back sooner than computed. A device that is busy makes both of them wait who come before and after."""
        compute_s = self._costs.predict_s(*self._costs.work(0, length, 0))
        copy_s = self._in.wait_s + self._in.copy_s(self._host.bytes_of(length))
        return self.cfg.reload == "always" or copy_s < ahead_s + compute_s * (1 + behind)

    def _spilled(self, kept: HostCacheEntry[list[int]], entry: Entry, held: list[int], is_made: bool) -> None:
        self.dram.finish_spill(kept, held)
        if not is_made:
            self.dram.drop_entry(kept)
        self.device.unpin(entry)
        self._count("spilled")

    def _reloaded(
        self, kept: HostCacheEntry[list[int]], entry: Entry, resume: Callable[[EngineRequest], None], is_made: bool
    ) -> None:
        is_good = self.dram.finish_reload(kept) and is_made
        if not is_made:
            self.dram.drop_entry(kept)
        works = self._reloading.pop(kept.key)
        if is_good and not entry.is_dropped:
            self.device.commit(entry, kept.length, kept.content)
            self.device.hold(entry, max(work.deadline_s for work in works))  # until they are planned
            entry.is_reloaded = not any(work.is_rank for work in works)
        elif not entry.is_dropped:
            self.device.drop(entry.key)
        self.device.unpin(entry)
        self._count("reloaded")
        for work in works:
            work.source = "dram"
            resume(work)
