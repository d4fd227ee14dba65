"""Host pages of the prefix cache: contents survive the round trip, and no page belongs to two prefixes."""

import random
from types import SimpleNamespace

import pytest
import torch

from nestrec.base.errors import UserError
from nestrec.models.hstu import HSTUConfig
from nestrec.serving.kv_cache import host_prefix_cache
from nestrec.serving.kv_cache.host_prefix_cache import HostPages
from nestrec.serving.kv_cache.kv_page_pool import PagePool, bytes_per_token

ENCODER = HSTUConfig(dim=8, num_layers=2, num_heads=2, head_dim=4, max_length=64)
NUM_PAGES, PAGE_TOKENS = 24, 4


@pytest.fixture(params=[{}, {"kv_cache_dtype": "fp8", "has_times": True}], ids=["plain", "fp8_and_times"])
def pool(request):
    cpu = torch.device("cpu")
    pool = PagePool(
        ENCODER, num_pages=NUM_PAGES, page_tokens=PAGE_TOKENS, device=cpu, dtype=torch.float32, **request.param
    )
    for layer in range(ENCODER.num_layers):
        pool.write(layer, list(range(NUM_PAGES)), 0, *torch.randn(2, NUM_PAGES * PAGE_TOKENS, 2, 4))
    if pool.paged_kv_cache.times is not None:
        pool.paged_kv_cache.times.uniform_()
    return pool


def content_of(pool, pages):
    """Return the full contents of pages as one tensor."""
    slots = torch.from_numpy(pool.slots(pages, 0, len(pages) * PAGE_TOKENS))
    cache = pool.paged_kv_cache
    planes = [cache.pool[:, :, :, slots].float()]
    planes += [] if cache.scales is None else [cache.scales[:, :, :, slots].float()]
    planes += [] if cache.times is None else [cache.times[slots].float()]
    return torch.cat([plane.flatten() for plane in planes])


def test_host_page_size_equals_device_page_size(pool):
    host = HostPages(pool, max_bytes=10 * pool.page_bytes + 1)
    planes = (pool.tensor, pool.paged_kv_cache.scales, pool.paged_kv_cache.times)
    assert pool.page_bytes * NUM_PAGES == sum(plane.nbytes for plane in planes if plane is not None)
    assert host.num_pages == 10
    assert [host.bytes_of(length) // pool.page_bytes for length in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_host_pages_out_of_memory_names_the_option(monkeypatch):
    def fail(_):
        raise RuntimeError("cannot allocate memory")

    monkeypatch.setattr(HostPages, "_allocate", fail)
    pool = SimpleNamespace(page_bytes=64, page_tokens=4, host_slabs={}, tensor=SimpleNamespace(is_cuda=True))
    with pytest.raises(UserError, match=r"^service\.engine\.prefix_cache\.host_bytes=640: exceeds"):
        HostPages(pool, max_bytes=640)


def test_host_pages_round_trip_into_other_pages(pool):
    host = HostPages(pool, max_bytes=10 * pool.page_bytes)
    before = content_of(pool, [7, 3, 12])
    host_pages = host.allocate(host.bytes_of(11))
    host.copy_out([7, 3, 12, 20], host_pages)
    untouched = content_of(pool, [0, 2, 4])
    host.copy_in([1, 23, 5, 2], host_pages)
    assert torch.equal(content_of(pool, [1, 23, 5]), before)
    assert torch.equal(content_of(pool, [0, 2, 4]), untouched)


@pytest.mark.parametrize("slab_pages", [1, 3, 100])
def test_host_pages_random_prefixes_keep_contents_and_bounds(pool, monkeypatch, slab_pages):
    monkeypatch.setattr(host_prefix_cache, "_SLAB_BYTES", slab_pages * pool.page_bytes)
    rng = random.Random(slab_pages)
    host = HostPages(pool, max_bytes=16 * pool.page_bytes)
    stored = {}
    for step in range(400):
        used = sum(len(host_pages) for host_pages, _ in stored.values())
        count = rng.randint(1, 6)
        if used + count <= 16:
            pages = rng.sample(range(NUM_PAGES), count)
            host_pages = host.allocate(count * pool.page_bytes)
            host.copy_out(pages, host_pages)
            stored[step] = host_pages, content_of(pool, pages)
        else:
            number = rng.choice(list(stored))
            host_pages, before = stored.pop(number)
            pages = rng.sample(range(NUM_PAGES), len(host_pages))
            host.copy_in(pages, host_pages)
            assert torch.equal(content_of(pool, pages), before)
            host.release(host_pages)
        pages = [page for host_pages, _ in stored.values() for page in host_pages]
        assert len(set(pages)) == len(pages)
        assert all(0 <= page < 16 for page in pages)
    assert sum(len(slab) for slab in pool.host_slabs.values()) <= 16


def test_host_pages_memory_is_allocated_on_demand(pool, monkeypatch):
    monkeypatch.setattr(host_prefix_cache, "_SLAB_BYTES", 4 * pool.page_bytes)
    host = HostPages(pool, max_bytes=10 * pool.page_bytes)
    assert not pool.host_slabs
    host.copy_out([0, 1], host.allocate(2 * pool.page_bytes))
    assert len(pool.host_slabs) == 1
    host.copy_out(list(range(8)), host.allocate(8 * pool.page_bytes))
    slabs = {key: slab.data_ptr() for key, slab in pool.host_slabs.items()}
    assert sorted(len(slab) for slab in pool.host_slabs.values()) == [2, 4, 4]
    later = HostPages(pool, max_bytes=10 * pool.page_bytes)
    later.copy_out(list(range(10)), later.allocate(10 * pool.page_bytes))
    assert {key: slab.data_ptr() for key, slab in pool.host_slabs.items()} == slabs


def test_kv_cache_fp8_halves_bytes_per_token():
    cfg = HSTUConfig(dim=1024, num_layers=8, num_heads=8, head_dim=128)
    bfloat16_bytes, fp8_bytes = (
        bytes_per_token(cfg, dtype, has_times=True) for dtype in (torch.bfloat16, torch.float8_e4m3fn)
    )
    assert 1.98 <= bfloat16_bytes / fp8_bytes <= 2.0


@pytest.mark.parametrize("scale", [1e-4, 1.0, 100.0])
def test_kv_cache_fp8_error_is_bounded(scale):
    pool = PagePool(
        ENCODER, num_pages=4, page_tokens=4, device=torch.device("cpu"), dtype=torch.float32, kv_cache_dtype="fp8"
    )
    keys, values = torch.randn(2, 13, 2, 4) * scale * torch.logspace(-2, 2, 13)[:, None, None]
    values[3] = 0.0
    pool.write(1, [3, 0, 2, 1], 0, keys, values)
    for found, original in zip(pool.read(1, [3, 0, 2, 1], 13), (keys, values), strict=True):
        # The error is relative to the number, or to the largest number of the token and head for much smaller ones.
        largest = original.abs().amax(2, keepdim=True)
        assert ((found.transpose(0, 1) - original).abs() <= original.abs() / 16 + largest * 2.0**-17).all()


def test_kv_cache_fp8_clamps_large_values():
    pool = PagePool(
        ENCODER, num_pages=1, page_tokens=4, device=torch.device("cpu"), dtype=torch.float32, kv_cache_dtype="fp8"
    )
    original = torch.tensor([1e6, -1e6, 57344.0, 1000.0]).expand(2, 2, 4)
    pool.write(0, [0], 0, original, original)
    found, _ = pool.read(0, [0], 2)
    assert torch.equal(found[0, 0], torch.tensor([57344.0, -57344.0, 57344.0, 1024.0]))
