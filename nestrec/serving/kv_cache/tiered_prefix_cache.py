"""Tiered prefix cache of an engine: a device tier, a host-memory tier, and the copies between them.

Prefixes are offloaded from the device to host memory when the device fills up, and reloaded for a later request if that
is faster than prefilling again.

The cache is used on the engine's thread. Copies run on one thread per direction, because the link is full duplex and
requests wait for reloads, and report back through `post`. On a GPU each copier has its own CUDA stream, so that copies
overlap with batches. A copy starts after the engine has seen the end of the batch that wrote the pages, and ends before
the engine is notified, so no stream has to wait for another.
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
from nestrec.serving.kv_cache.kv_page_pool import KVCacheDtype, PagePool, pool_for
from nestrec.serving.kv_cache.prefix_cache import Entry, PrefixCache
from nestrec.serving.model.model_adapter import ModelAdapter

_TASK = "nestrec-copier"
_SMOOTH = 0.1
_UNKNOWN_S = 1e-9


class Copier:
    """Runs the copies of one direction in order on its own thread, and learns their cost."""

    def __init__(self, device: torch.device) -> None:
        self._stream = side_stream(device)
        FAILURES.register(_TASK)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=_TASK)
        self._lock = threading.Lock()
        self._seconds_per_byte: float | None = None
        self._queued_bytes = 0

    def submit(self, copy: Callable[[], None], num_bytes: int, done: Callable[[bool], None]) -> None:
        """Queue a copy.

        Args:
            copy: Performs the copy.
            num_bytes: Size of the copy.
            done: Called on the copier's thread with whether the copy succeeded.
        """

        def run() -> None:
            is_made = False
            try:
                self._make(copy, num_bytes)
                is_made = True
            except Exception as error:
                FAILURES.add(_TASK, error, "the prefix is dropped from the cache")
            finally:  # requests wait for it
                with self._lock:
                    self._queued_bytes -= num_bytes
                guarded(_TASK, lambda: done(is_made))  # the thread pool would not report an exception

        with self._lock:
            self._queued_bytes += num_bytes
        self._pool.submit(run)

    def _make(self, copy: Callable[[], None], num_bytes: int) -> None:
        start_s = time.perf_counter()
        self._transfer(copy, num_bytes)
        seconds = (time.perf_counter() - start_s) / max(num_bytes, 1)
        with self._lock:
            known = self._seconds_per_byte
            self._seconds_per_byte = seconds if known is None else known + _SMOOTH * (seconds - known)

    def _transfer(self, copy: Callable[[], None], num_bytes: int) -> None:
        """Perform a copy and return when it has ended; runs on the copier's thread."""
        with on_stream(self._stream):
            copy()

    def wait(self) -> None:
        """Wait until all submitted copies have ended; called by the thread that submits them."""
        self._pool.submit(lambda: None).result()
        self._queued_bytes = 0  # discards bytes of a copy whose submission failed

    def copy_s(self, num_bytes: int) -> float:
        """Return the expected seconds of a copy; before the first one, a slow link is assumed."""
        return num_bytes * (_UNKNOWN_S if self._seconds_per_byte is None else self._seconds_per_byte)

    def learn(self, copy: Callable[[], None], num_bytes: int) -> None:
        """Measure the cost of copies by performing one twice and timing the second.

        Without it, an initial estimate that is too high would never be corrected, because no copy would be started.
        """
        for _ in range(2):
            is_done: Future[bool] = Future()
            self._seconds_per_byte = None
            self.submit(copy, num_bytes, is_done.set_result)
            is_done.result()

    @property
    def wait_s(self) -> float:
        """Expected seconds of the copies that are queued or running."""
        return self.copy_s(self._queued_bytes)

    def close(self) -> None:
        self._pool.shutdown()


def break_even_tokens(costs: EngineCostModel, copier: Copier, bytes_per_token: int, longest: int) -> int | None:
    """Return the prefix length in tokens from which a reload is faster than prefilling; None if it never is."""
    for length in [1 << i for i in range(longest.bit_length() + 1)]:
        if copier.copy_s(length * bytes_per_token) < costs.predict_s(*costs.work(0, length, 0)):
            return length
    return None


_MAX_OFFLOAD_WAIT_S = 0.1
_LEARNED_PAGES = 32
_MIN_NEW_FRACTION = 0.125
"""Minimum fraction of new tokens for offloading a prefix again: prefilling fewer tokens after a reload is cheaper than
copying the complete prefix at each visit."""
Post = Callable[[Callable[[], None]], None]


@config
class PrefixCacheConfig:
    device_bytes: Natural = 1 << 30
    """Device memory of the KV cache for prefixes in bytes; more memory caches more users."""
    host_bytes: Natural = 1 << 30
    """Host memory for prefixes evicted from the device in bytes; 0 disables the host tier."""
    device_ttl_s: NonNegative = 600.0
    """Lifetime of a prefix on the device in seconds."""
    host_ttl_s: NonNegative = 600.0
    """Lifetime of a prefix in host memory in seconds."""
    offload_threshold: NonNegative = 0.5
    """Fraction of device pages in use above which prefixes are offloaded to host memory."""
    page_tokens: Count = 64
    """Number of tokens per page, the allocation unit of the KV cache; the last page of each prefix is half empty on
    average."""
    enabled: bool = True
    """Whether prefixes are cached; if false, every request is computed in full."""
    keep_on_device: bool = True
    """Whether a prefix stays on the device after ranking; if false, only host memory keeps it."""
    reload_policy: Literal["when_faster", "always"] = "when_faster"
    """When to reload a prefix from host memory: if that is faster than prefilling it, or always."""


class TieredPrefixCache:
    """Prefix cache with a device tier and a host-memory tier; used on the engine's thread only."""

    def __init__(
        self,
        adapter: ModelAdapter,
        cfg: PrefixCacheConfig,
        *,
        keyed: KeyedHash,
        clock: Clock,
        costs: EngineCostModel,
        post: Post,
        count: Callable[[str], None],
        pool: PagePool | None = None,
        kv_cache_dtype: KVCacheDtype = "model",
        make_copier: Callable[[torch.device], Copier] = Copier,
    ):
        """Allocate both tiers and measure the cost of copies.

        Args:
            adapter: Adapter of the model.
            cfg: Options of the prefix cache.
            keyed: Hashes users to cache buckets.
            clock: Source of time.
            costs: Cost model of the engine.
            post: Schedules a callback on the engine's thread.
            count: Counts an event for the metrics.
            pool: Existing pages to reuse, of which at most `cfg.device_bytes` are used.
            kv_cache_dtype: Data type of the KV cache.
            make_copier: Creates the copier of each direction.

        Raises:
            UserError: There is too little memory for one of the tiers.
        """
        self.cfg = cfg
        self._costs = costs
        self._post = post
        self._count = count
        servable = adapter.servable
        self._longest = servable.encoder_config.max_length
        cache_bytes = cfg.device_bytes if cfg.enabled else 0
        self.pool = pool or pool_for(
            servable, cache_bytes=cache_bytes, page_tokens=cfg.page_tokens, kv_cache_dtype=kv_cache_dtype
        )
        self.bytes_per_token = self.pool.token_bytes
        num_pages = min(max(1, cache_bytes // self.pool.page_bytes), self.pool.num_pages)
        self.num_bytes = num_pages * self.pool.page_bytes
        self.device = PrefixCache(
            num_pages=num_pages,
            page_tokens=self.pool.page_tokens,
            clock=clock,
            ttl_s=cfg.device_ttl_s,
            bucket_of=lambda key: keyed.digest("slot", key.user, key.version, key.config),
        )
        self._host_pages = HostPages(self.pool, max_bytes=cfg.host_bytes if cfg.enabled else 0)
        self.host_cache: HostPrefixCache[list[int]] = HostPrefixCache(
            max_bytes=self._host_pages.num_pages * self._host_pages.page_bytes,
            ttl_s=cfg.host_ttl_s,
            clock=clock,
            release=self._host_pages.release,
        )
        self._out = make_copier(servable.device)
        self._in = make_copier(servable.device)
        self._reloading: dict[CacheKey, list[EngineRequest]] = {}
        self._num_clears = 0
        self._learn_copies(num_pages)

    def _learn_copies(self, num_pages: int) -> None:
        """Measure the copy cost of both directions before the first decision between copying and prefilling."""
        host_pages = self._host_pages.allocate(
            min(_LEARNED_PAGES, num_pages, self._host_pages.num_pages) * self._host_pages.page_bytes
        )
        if host_pages:
            pages = list(range(len(host_pages)))
            num_bytes = len(host_pages) * self._host_pages.page_bytes
            self._out.learn(lambda: self._host_pages.copy_out(pages, host_pages), num_bytes)
            self._in.learn(lambda: self._host_pages.copy_in(pages, host_pages), num_bytes)
            self._host_pages.release(host_pages)

    def find(self, request: EngineRequest) -> Entry | None:
        """Return the prefix of a request on the device, without pinning it.

        The result is None while the prefix is being reloaded, so that pages have only one writer; `reload` then lets
        the request wait for the copy.
        """
        if not self.cfg.enabled or request.tokens.num_cacheable == 0 or request.key in self._reloading:
            return None
        entry = self.device.find(request.key, request.content_of)
        if entry is not None and request.source == "none":
            request.source = "host" if entry.is_reloaded else "device"
            entry.is_reloaded = (
                entry.is_reloaded and not request.is_rank
            )  # keeps_prefix set until a ranking request uses it
        return entry

    def reserve(self, request: EngineRequest, entry: Entry | None, num_tokens: int) -> tuple[Entry | None, int]:
        """Pin or create an entry with capacity for `num_tokens` tokens.

        Returns:
            The pinned entry, if there is one, and the number of tokens that it has capacity for.
        """
        first = entry.length if entry is not None else 0
        if entry is not None:
            self.device.pin(entry)
        elif self.cfg.enabled and num_tokens:
            entry = self.device.create(request.key)
        has_capacity = entry is not None and self.device.grow(entry, num_tokens)
        return entry, num_tokens if has_capacity else first

    def drop(self, key: CacheKey) -> None:
        """Drop the prefix of a key in both tiers."""
        self.device.evict(key)
        self.host_cache.drop(key)

    def drop_stale(self, version: str, limit: int) -> bool:
        """Drop at most `limit` prefixes per tier of other versions than this one; return whether there may be more."""
        dropped = self.device.drop_oldest(lambda key: key.version != version, limit)
        return dropped + self.host_cache.drop_oldest(lambda key: key.version != version, limit) > 0

    def offload(self, entry: Entry, request: EngineRequest, *, ahead_s: float) -> None:
        """Copy the prefix of a request to host memory if the device fills up or does not keep prefixes.

        A prefix is copied only if a reload would currently be faster than prefilling it, if host memory lacks a
        substantial part of it, and if the copies in the queue are short, since entries that wait for a copy cannot be
        evicted. A prefix that was dropped during the batch is not copied.

        Args:
            entry: Entry of the prefix.
            request: Request whose prefix it is.
            ahead_s: Device seconds of the queued requests, which prefilling would have to wait for.
        """
        if entry.is_dropped:
            return
        used = 1.0 - self.device.num_free_pages / self.device.num_pages
        keeps_prefix = self.cfg.keep_on_device
        if self.host_cache.max_bytes == 0 or entry.length == 0 or (keeps_prefix and used <= self.cfg.offload_threshold):
            return
        num_bytes = self._host_pages.bytes_of(entry.length)
        host_entry = None
        known = self.host_cache.find(entry.key, request.content_of)
        is_new = known is None or entry.length - known.length > _MIN_NEW_FRACTION * entry.length
        is_faster = is_new and self._is_copy_faster(entry.length, ahead_s, num_behind=0)
        if is_faster and self._out.wait_s <= _MAX_OFFLOAD_WAIT_S:
            host_entry = self.host_cache.start_offload(
                entry.key, length=entry.length, content=entry.content, num_bytes=num_bytes
            )
        if host_entry is not None:
            self.device.pin(entry)
            pages = list(entry.pages)
            host_pages = self._host_pages.allocate(num_bytes)
            finish = self._post_to_engine(lambda is_made: self._finish_offload(host_entry, entry, host_pages, is_made))
            self._out.submit(lambda: self._host_pages.copy_out(pages, host_pages), num_bytes, finish)
        if not keeps_prefix:
            self.device.evict(entry.key)

    def reload(
        self, request: EngineRequest, *, ahead_s: float, num_behind: int, resume: Callable[[EngineRequest], None]
    ) -> bool:
        """Start or join a copy of the prefix from host memory if it is faster than prefilling.

        The reloaded prefix is reserved until the request is completed or released.

        Args:
            request: Request that needs the prefix.
            ahead_s: Device seconds until the prefix could be prefilled instead.
            num_behind: Number of requests that would wait for the prefill.
            resume: Called with the request when the copy has ended.

        Returns:
            Whether the request waits for a copy.
        """
        if request.source == "host" or not self.cfg.enabled:  # reloaded once already
            return False
        if request.key in self._reloading:
            self._reloading[request.key].append(request)
            return True
        host_entry = self.host_cache.find(request.key, request.content_of)
        if (
            host_entry is None
            or host_entry.payload is None
            or not self._is_copy_faster(host_entry.length, ahead_s, num_behind)
        ):
            return False
        entry = self.device.create(request.key)
        if entry is None or not self.device.grow(entry, host_entry.length):
            if entry is not None:
                self.device.unpin(entry)
            return False
        self._reloading[request.key] = [request]
        self.host_cache.start_reload(host_entry)
        pages = list(entry.pages)
        host_pages = host_entry.payload
        finish = self._post_to_engine(lambda is_made: self._finish_reload(host_entry, entry, resume, is_made))
        self._in.submit(lambda: self._host_pages.copy_in(pages, host_pages), host_entry.num_bytes, finish)
        return True

    def clear(self) -> None:
        """Drop all prefixes and all requests that wait for copies, after the copies in flight have ended.

        This does not depend on state that an exception may have left inconsistent, and it releases all pages.
        """
        self._out.wait()
        self._in.wait()
        self._num_clears += 1
        self._reloading.clear()
        self.device.clear()
        self.host_cache.clear()
        self._host_pages.clear()

    def _post_to_engine(self, finish: Callable[[bool], None]) -> Callable[[bool], None]:
        """Return a callback that runs `finish` on the engine's thread, unless the cache was cleared in the meantime."""
        num_clears = self._num_clears

        def finish_if_current(is_made: bool) -> None:
            if self._num_clears == num_clears:
                finish(is_made)

        return lambda is_made: self._post(lambda: finish_if_current(is_made))

    def release(self, request: EngineRequest) -> None:
        """End the reservation of a prefix that was computed or reloaded for a request that was cancelled."""
        entry = self.find(request) if request.is_started or request.source == "host" else None
        if entry is not None:
            self.device.reserve_until(entry, float("-inf"))

    def waiting(self) -> list[EngineRequest]:
        """Return the requests that wait for a copy."""
        return [request for requests in self._reloading.values() for request in requests]

    def break_even_tokens(self) -> int | None:
        """Return the prefix length in tokens from which a reload is faster than prefilling; None if it never is."""
        return break_even_tokens(self._costs, self._in, self.bytes_per_token, self._longest)

    def close(self) -> None:
        self._out.close()
        self._in.close()

    def _is_copy_faster(self, length: int, ahead_s: float, num_behind: int) -> bool:
        """Return whether a reload is preferred to prefilling.

        Prefilling waits for the requests ahead, and delays the later ones.
        """
        compute_s = self._costs.predict_s(*self._costs.work(0, length, 0))
        copy_s = self._in.wait_s + self._in.copy_s(self._host_pages.bytes_of(length))
        return self.cfg.reload_policy == "always" or copy_s < ahead_s + compute_s * (1 + num_behind)

    def _finish_offload(
        self, host_entry: HostCacheEntry[list[int]], entry: Entry, host_pages: list[int], is_made: bool
    ) -> None:
        self.host_cache.finish_offload(host_entry, host_pages)
        if not is_made:
            self.host_cache.drop_entry(host_entry)
        self.device.unpin(entry)
        self._count("offloaded")

    def _finish_reload(
        self,
        host_entry: HostCacheEntry[list[int]],
        entry: Entry,
        resume: Callable[[EngineRequest], None],
        is_made: bool,
    ) -> None:
        is_valid = self.host_cache.finish_reload(host_entry) and is_made
        if not is_made:
            self.host_cache.drop_entry(host_entry)
        requests = self._reloading.pop(host_entry.key)
        if is_valid and not entry.is_dropped:
            self.device.commit(entry, host_entry.length, host_entry.content)
            self.device.reserve_until(
                entry, max(request.deadline_s for request in requests)
            )  # until they are scheduled
            entry.is_reloaded = not any(request.is_rank for request in requests)
        elif not entry.is_dropped:
            self.device.evict(entry.key)
        self.device.unpin(entry)
        self._count("reloaded")
        for request in requests:
            request.source = "host"
            resume(request)
