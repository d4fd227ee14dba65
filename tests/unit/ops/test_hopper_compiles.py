"""Attention and search kernels, compiled for a Hopper GPU without one, fit its shared memory."""

import subprocess
import sys

import pytest

pytest.importorskip("triton")
SHARED_BYTES = 232_448
"""Maximum shared memory per program on an H100 or H200, in bytes."""
HOPPER = """
import sys
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

class Hopper:
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device: 0

driver.set_active(Hopper())
launch = JITFunction.run

def compiled(self, *arguments, grid, warmup, **options):
    print(self.__name__, launch(self, *arguments, grid=grid, warmup=True, **options).metadata.shared)

JITFunction.run = compiled
torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132, total_memory=1 << 37)
torch.cuda.get_device_capability = lambda device: (9, 0)
"""
"""Program in which a launch compiles its kernel for a Hopper GPU and prints its name and its shared memory."""
ATTENTION = """
from nestrec.ops.attention.attention_inputs import AttentionInputs
from nestrec.ops.attention.mask_and_bias import AttentionMask
from nestrec.ops.attention.hstu_passes import backward_pass, forward_pass
from nestrec.ops.attention.mask_and_bias import RelativeBias

dim, has_rules, has_position, has_time = (int(word) for word in sys.argv[1:])
offsets, time = torch.tensor([0, 70, 70, 200]), torch.arange(200, dtype=torch.float64)
q, k, v, grad = (torch.zeros(200, 2, dim, dtype=torch.bfloat16) for _ in range(4))
bias = RelativeBias(position_table=torch.zeros(261) if has_position else None,
                    time_table=torch.zeros(129) if has_time == 1 else None,
                    time_function=torch.zeros(3) if has_time == 2 else None, time_T=time, query_time_T=time)
rules = AttentionMask(num_targets_B=torch.tensor([3, 0, 9]), num_context=4, max_attention_length=50)
inputs = AttentionInputs(offsets, 130, 130.0, bias, rules if has_rules else AttentionMask())
if has_time == 2 and (dim > 128 or has_rules):
    sys.exit()  # no launch has both
forward_pass(q, k, v, inputs)
backward_pass(grad, q, k, v, inputs)
"""


SEARCH = """
torch.version.cuda = "12.8"
import contextlib
torch.cuda.device_of = lambda tensor: contextlib.nullcontext()
from nestrec.ops.embedding import top_k_search
top_k_search.runs_triton = lambda tensor: True
dtype, num_queries, dim = getattr(torch, sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
scale = torch.ones(300) if dtype.itemsize == 1 else None
pairs = top_k_search.ExcludedPairs.of(torch.zeros(5, dtype=torch.int32), torch.arange(5))
index = top_k_search.IndexRows(rows_ND=torch.zeros(300, dim, dtype=dtype), scale_N=scale)
top_k_search.top_k_keys(torch.zeros(num_queries, dim), index, 10, pairs)
"""


def compile_launches(program: str, *words: str) -> list[list[str]]:
    """Return the kernel and its bytes of shared memory for each launch of the program."""
    command = [sys.executable, "-c", HOPPER + program, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("dtype", "queries", "dim"), [
    ("bfloat16", 16, 128), ("bfloat16", 64, 512), ("float32", 64, 256), ("int8", 16, 64), ("float8_e4m3fn", 16, 128),
])  # fmt: skip
def test_search_kernels_fit_shared_memory_of_hopper(dtype, queries, dim):
    found = compile_launches(SEARCH, dtype, str(queries), str(dim))
    assert [name for name, _ in found] == ["_pass_kernel", "_chosen_kernel"]
    assert max(int(shared) for _, shared in found) <= SHARED_BYTES


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("biases", ["0 0", "1 0", "1 1", "0 2", "1 2"])
@pytest.mark.parametrize("has_rules", [0, 1])
@pytest.mark.parametrize("dim", [24, 64, 128, 256])
def test_attention_kernels_fit_shared_memory_of_hopper(dim, has_rules, biases):
    found = compile_launches(ATTENTION, str(dim), str(has_rules), *biases.split())
    if biases.endswith("2") and (dim > 128 or has_rules):
        return
    assert {"stream_kernel"} <= {name for name, _ in found}
    assert max(int(shared) for _, shared in found) <= SHARED_BYTES


PAGED = """
from nestrec.ops.attention.paged.paged_attention import PagedLayerKV, Workspace, paged_attention, store_in_pages
from nestrec.ops.attention.paged.paged_bias import PairPlan, PairTimes, compute_buckets, store_times, write_biases
from nestrec.ops.attention.paged.query_blocks import FIELDS, VisibleRange, max_tiles

dim, weights, kind, is_small, is_local = int(sys.argv[1]), *sys.argv[2:4], *(int(word) for word in sys.argv[4:])
visible_range, rows = VisibleRange(50, 7) if is_local else VisibleRange(), 200
time = torch.zeros(rows, dtype=torch.float64)
plan = PairPlan(blocks=torch.zeros(8, FIELDS, dtype=torch.int32), pages=torch.zeros(9, dtype=torch.int32),
                page_tokens=64, num_tiles=max_tiles(8, 300), visible_range=visible_range)
times = PairTimes(slots=torch.zeros(640, dtype=torch.float64), time_T=time, query_time_T=time)
q, k, v = torch.zeros(rows, 6 * dim, dtype=torch.bfloat16).chunk(3, dim=1)
pool = torch.zeros(2, 2, 640, dim, dtype=torch.float8_e4m3fn if is_small else torch.bfloat16)
cache = PagedLayerKV(pool, torch.zeros(2, 2, 640, dtype=torch.uint8) if is_small else None)
slots, biases = torch.zeros(rows, dtype=torch.int32), None
store_in_pages(k, v, cache, slots)
store_times(time, slots, times.slots)
if kind != "none":
    biases = plan.allocate_tiles(q.dtype)
    write_biases(biases, plan, times=times,
                 position_table=torch.zeros(601) if kind != "time" else None,
                 time_table=torch.zeros(65) if kind in ("tables", "time") else None,
                 buckets=compute_buckets(plan, times, 64) if kind in ("tables", "time") else None,
                 time_function=torch.zeros(3) if kind == "function" else None)
for num_queries in (None, 64):
    paged_attention(None if weights == "channel" else q, k, v, cache, plan.blocks, plan.pages, page_tokens=64,
                    scale=1.0, workspace=Workspace.create(2, dim, torch.device("cpu")), weights=weights, biases=biases,
                    num_queries=num_queries, visible_range=visible_range)
"""
PAGED_CASES = [
    "128 silu none 0 0",
    "128 silu tables 0 0",
    "128 silu function 1 1",
    "50 silu position 0 1",
    "50 softmax none 1 0",
    "256 softmax none 0 0",
    "128 channel time 0 0",
    "256 channel position 1 1",
    "256 silu tables 1 0",
]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", PAGED_CASES)
def test_paged_kernels_fit_shared_memory_of_hopper(case):
    found = compile_launches(PAGED, *case.split())
    assert {"attention_kernel", "store_kernel"} <= {name for name, _ in found}
    assert max(int(shared) for _, shared in found) <= SHARED_BYTES
