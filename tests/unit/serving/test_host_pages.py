"""Host memory of prefixes: what went out comes back, and no page is two prefixes'."""

import random

import pytest
import torch

from nestrec.models.hstu import HSTUConfig
from nestrec.serving.prefix import host_pages
from nestrec.serving.prefix.host_pages import HostPages
from nestrec.serving.prefix.page_pool import PagePool

ENCODER = HSTUConfig(dim=8, num_layers=2, num_heads=2, head_dim=4, max_length=64)
NUM_PAGES, PAGE_TOKENS = 24, 4


@pytest.fixture
def pool():
    pool = PagePool(
        ENCODER, num_pages=NUM_PAGES, page_tokens=PAGE_TOKENS, device=torch.device("cpu"), dtype=torch.float32
    )
    pool.tensor.normal_()
    return pool


def content_of(pool, pages):
    return pool.tensor[:, :, :, pool.slots(pages, 0, len(pages) * PAGE_TOKENS)].clone()


def test_a_page_of_the_host_is_as_large_as_one_of_the_device(pool):
    host = HostPages(pool, max_bytes=10 * pool.page_bytes + 1)
    assert pool.page_bytes * NUM_PAGES == pool.tensor.numel() * 4
    assert host.num_pages == 10
    assert [host.bytes_of(length) // pool.page_bytes for length in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_what_went_out_comes_back_into_other_pages(pool):
    host = HostPages(pool, max_bytes=10 * pool.page_bytes)
    before, held = content_of(pool, [7, 3, 12]), host.take(host.bytes_of(11))
    host.copy_out([7, 3, 12, 20], held)
    untouched = content_of(pool, [0, 2, 4])
    host.copy_in([1, 23, 5, 2], held)
    assert torch.equal(content_of(pool, [1, 23, 5]), before)
    assert torch.equal(content_of(pool, [0, 2, 4]), untouched)


@pytest.mark.parametrize("slab_pages", [1, 3, 100])
def test_random_prefixes_keep_what_they_hold_within_the_bytes(pool, monkeypatch, slab_pages):
    monkeypatch.setattr(host_pages, "_SLAB_BYTES", slab_pages * pool.page_bytes)
    rng, host, kept = random.Random(slab_pages), HostPages(pool, max_bytes=16 * pool.page_bytes), {}
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
    monkeypatch.setattr(host_pages, "_SLAB_BYTES", 4 * pool.page_bytes)
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
