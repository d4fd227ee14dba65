"""No kernel reads or writes outside of its tensors, according to NVIDIA compute-sanitizer."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
FOLDERS = [Path(root, "bin") for root in ("/usr/local/cuda", "/usr/local/cuda/compute-sanitizer")]
SANITIZER = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *map(str, FOLDERS)]))
# Without the caching allocator of PyTorch, every tensor has its own allocation, so out-of-bounds accesses are detected.
ENVIRONMENT = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


@pytest.mark.timeout(300)
@pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer is not installed")
def test_kernels_pass_memcheck_on_small_shapes():
    script = Path(__file__).with_name("small_shapes.py")
    command = [str(SANITIZER), "--tool", "memcheck", "--error-exitcode", "9", sys.executable, str(script)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=280, check=False)
    if "Device not supported" in done.stdout:
        pytest.skip("compute-sanitizer does not run on this machine")
    assert done.returncode == 0, done.stdout[-3000:]
    assert "all kernels ran" in done.stdout
    assert "ERROR SUMMARY: 0 errors" in done.stdout
