"""Host memory of prefixes: what went out comes back, and no page is two prefixes'."""

import random

import pytest
import torch

from nestrec.models.hstu import HSTUConfig
from nestrec.serving.kv_cache import host_prefix_cache
from nestrec.serving.kv_cache.host_prefix_cache import HostPages
from nestrec.serving.kv_cache.kv_page_pool import PagePool, bytes_a_token

ENCODER = HSTUConfig(dim=8, num_layers=2, num_heads=2, head_dim=4, max_length=64)
NUM_PAGES, PAGE_TOKENS = 24, 4


@pytest.fixture(params=[{}, {"prefix_dtype": "fp8", "has_times": True}], ids=["plain", "8 bits and times"])
def pool(request):
    cpu = torch.device("cpu")
    pool = PagePool(
        ENCODER, num_pages=NUM_PAGES, page_tokens=PAGE_TOKENS, device=cpu, dtype=torch.float32, **request.param
    )
    for layer in range(ENCODER.num_layers):
        pool.write(layer, list(range(NUM_PAGES)), 0, *torch.randn(2, NUM_PAGES * PAGE_TOKENS, 2, 4))
    if pool.kept_pages.times is not None:
        pool.kept_pages.times.uniform_()
    return pool


def content_of(pool, pages):
    """Everything that pages hold."""
    slots = torch.from_numpy(pool.slots(pages, 0, len(pages) * PAGE_TOKENS))
    kept = pool.kept_pages
    planes = [kept.pool[:, :, :, slots].float()]
    planes += [] if kept.scales is None else [kept.scales[:, :, :, slots].float()]
    planes += [] if kept.times is None else [kept.times[slots].float()]
    return torch.cat([plane.flatten() for plane in planes])


def test_a_page_of_the_host_is_as_large_as_one_of_the_device(pool):
    host = HostPages(pool, max_bytes=10 * pool.page_bytes + 1)
    planes = (pool.tensor, pool.kept_pages.scales, pool.kept_pages.times)
    assert pool.page_bytes * NUM_PAGES == sum(plane.nbytes for plane in planes if plane is not None)
    assert host.num_pages == 10
    assert [host.bytes_of(length) // pool.page_bytes for length in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_what_went_out_comes_back_into_other_pages(pool):
    host = HostPages(pool, max_bytes=10 * pool.page_bytes)
    before = content_of(pool, [7, 3, 12])
    held = host.take(host.bytes_of(11))
    host.copy_out([7, 3, 12, 20], held)
    untouched = content_of(pool, [0, 2, 4])
    host.copy_in([1, 23, 5, 2], held)
    assert torch.equal(content_of(pool, [1, 23, 5]), before)
    assert torch.equal(content_of(pool, [0, 2, 4]), untouched)


@pytest.mark.parametrize("slab_pages", [1, 3, 100])
def test_random_prefixes_keep_what_they_hold_within_the_bytes(pool, monkeypatch, slab_pages):
    monkeypatch.setattr(host_prefix_cache, "_SLAB_BYTES", slab_pages * pool.page_bytes)
    rng = random.Random(slab_pages)
    host = HostPages(pool, max_bytes=16 * pool.page_bytes)
    kept = {}
    for step in range(400):
        used = sum(len(held) for held, _ in kept.values())
        count = rng.randint(1, 6)
        if used + count <= 16:
            pages = rng.sample(range(NUM_PAGES), count)
            held = host.take(count * pool.page_bytes)
            host.copy_out(pages, held)
            kept[step] = held, content_of(pool, pages)
        else:
            number = rng.choice(list(kept))
            held, before = kept.pop(number)
            pages = rng.sample(range(NUM_PAGES), len(held))
            host.copy_in(pages, held)
            assert torch.equal(content_of(pool, pages), before)
            host.give(held)
        pages = [page for held, _ in kept.values() for page in held]
        assert len(set(pages)) == len(pages)
        assert all(0 <= page < 16 for page in pages)
    assert sum(len(slab) for slab in pool.host_slabs.values()) <= 16


def test_memory_is_taken_as_it_is_needed_and_stays_for_the_next_engine_of_the_pool(pool, monkeypatch):
    monkeypatch.setattr(host_prefix_cache, "_SLAB_BYTES", 4 * pool.page_bytes)
    host = HostPages(pool, max_bytes=10 * pool.page_bytes)
    assert not pool.host_slabs
    host.copy_out([0, 1], host.take(2 * pool.page_bytes))
    assert len(pool.host_slabs) == 1
    host.copy_out(list(range(8)), host.take(8 * pool.page_bytes))
    slabs = {key: slab.data_ptr() for key, slab in pool.host_slabs.items()}
    assert sorted(len(slab) for slab in pool.host_slabs.values()) == [2, 4, 4]
    later = HostPages(pool, max_bytes=10 * pool.page_bytes)
    later.copy_out(list(range(10)), later.take(10 * pool.page_bytes))
    assert {key: slab.data_ptr() for key, slab in pool.host_slabs.items()} == slabs


def test_8_bits_keep_twice_the_users_of_16_in_the_same_bytes():
    kept = HSTUConfig(dim=1024, num_layers=8, num_heads=8, head_dim=128)
    of_16, of_8 = (bytes_a_token(kept, dtype, has_times=True) for dtype in (torch.bfloat16, torch.float8_e4m3fn))
    assert 1.98 <= of_16 / of_8 <= 2.0


@pytest.mark.parametrize("scale", [1e-4, 1.0, 100.0])
def test_8_bits_are_right_to_a_sixteenth_whatever_the_size_of_a_token(scale):
    pool = PagePool(
        ENCODER, num_pages=4, page_tokens=4, device=torch.device("cpu"), dtype=torch.float32, prefix_dtype="fp8"
    )
    keys, values = torch.randn(2, 13, 2, 4) * scale * torch.logspace(-2, 2, 13)[:, None, None]
    values[3] = 0.0
    pool.write(1, [3, 0, 2, 1], 0, keys, values)
    for found, given in zip(pool.read(1, [3, 0, 2, 1], 13), (keys, values), strict=True):
        # Of each number, and of numbers far below the largest of their token and head, of that one.
        largest = given.abs().amax(2, keepdim=True)
        assert ((found.transpose(0, 1) - given).abs() <= given.abs() / 16 + largest * 2.0**-17).all()


def test_what_no_power_of_8_bits_reaches_is_cut_off():
    pool = PagePool(
        ENCODER, num_pages=1, page_tokens=4, device=torch.device("cpu"), dtype=torch.float32, prefix_dtype="fp8"
    )
    given = torch.tensor([1e6, -1e6, 57344.0, 1000.0]).expand(2, 2, 4)
    pool.write(0, [0], 0, given, given)
    found, _ = pool.read(0, [0], 2)
    assert torch.equal(found[0, 0], torch.tensor([57344.0, -57344.0, 57344.0, 1024.0]))
