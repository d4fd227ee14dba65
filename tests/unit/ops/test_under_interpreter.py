"""Runs the tests of Triton kernels in the Triton interpreter, in a separate process, without a GPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]
WARNINGS = [
    "ignore:Conversion of an array with ndim:DeprecationWarning",
    "ignore:overflow encountered:RuntimeWarning",
    "ignore:divide by zero:RuntimeWarning",
    "ignore:invalid value:RuntimeWarning",
]
"""Warnings that the interpreter causes by its use of numpy: conversions, and exponentials of masked logits."""
LOSSES = ["unit/ops/test_sampled_losses.py", "unit/ops/test_tiled_cross_entropy.py"]
LARGE_LOSSES = (
    "(sampled_losses or tiled_cross_entropy)"
    " and not ((fused and (shape0 or shape2 or shape3)) or tile1-shape2 or popular)"
)
"""Cases that take too long in the interpreter."""
LONG_SUMS = "test_sum_by_index_is_bitwise and ((3000 and not dtype2) or (1500 and not dtype0))"
MORE_LAYERS = "test_layer_inputs_and_outputs and (dtype0-2-rms or dtype0-1-layer or dtype1-3-rms)"
MORE_BIASES = "test_bias_only_attention_equals and ((lengths0 and dtype1) or (lengths1 and dtype0))"
SHORT_SELECTION = " and ".join(f"not ({cases})" for cases in (LARGE_LOSSES, LONG_SUMS, MORE_LAYERS, MORE_BIASES))
"""Selects every shape and every dtype, but not every combination of them."""
ROWS_AND_LAYERS = ["gpu/test_row_kernels_gpu.py", "gpu/test_layers_gpu.py", "gpu/test_fp8_gpu.py"]
TOP_K = "gpu/test_best_rows_gpu.py"
ATTENTION = ["unit/ops/test_attention_kernels.py", "unit/ops/test_time_nodes.py"]
PAGED_ATTENTION = ["unit/ops/test_paged_attention.py", "serve/test_paged_batches.py"]
KERNELS = {
    "all": [*ROWS_AND_LAYERS, TOP_K, *LOSSES, *ATTENTION, *PAGED_ATTENTION, "-m", "not slow", "-k", SHORT_SELECTION],
    "more cases of rows and layers": [*ROWS_AND_LAYERS, "-m", "gpu"],
    "more cases of attention": [*ATTENTION, "-m", "slow"],
    "more cases of pages": [*PAGED_ATTENTION, "-m", "slow"],
}


@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    "kernels", [pytest.param(name, marks=[pytest.mark.slow] if "more" in name else []) for name in KERNELS]
)
def test_kernels_pass_tests_in_triton_interpreter(kernels):
    warning_options = [word for warning in WARNINGS for word in ("-W", warning)]
    tests = [str(TESTS / word) if word.endswith(".py") else word for word in KERNELS[kernels]]
    plugins = ["-p", "no:cacheprovider", "-p", "support.fast_interpreter"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, "-rs", *warning_options, *tests]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "TRITON_INTERPRET" not in done.stdout, "TRITON_INTERPRET was set, but tests were skipped for lack of it"
