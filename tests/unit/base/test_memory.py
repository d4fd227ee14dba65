import gc
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from nestrec.base.process import gc_frozen_import

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_TENSOR_BYTES = 1 << 26
_COUNT_PAGE_FAULTS = f"""
import resource
from nestrec.base.process import enable_huge_pages
enable_huge_pages()
import torch
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.ones({_TENSOR_BYTES // 4})
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _page_faults(**environment: str) -> int:
    command = [sys.executable, "-c", _COUNT_PAGE_FAULTS]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)


@pytest.mark.skipif(
    not _SETTING.exists() or "[madvise]" not in _SETTING.read_text(),
    reason="this kernel does not allocate huge pages on request",
)
@pytest.mark.slow
def test_huge_pages_back_large_tensors_unless_disabled() -> None:
    small_pages = _TENSOR_BYTES // resource.getpagesize()
    path = {"PYTHONPATH": ":".join(sys.path)}
    assert _page_faults(**path) < small_pages / 4
    assert _page_faults(**path, THP_MEM_ALLOC_ENABLE="0") >= small_pages


def test_gc_ignores_objects_created_during_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys)
    before = gc.get_freeze_count()
    with gc_frozen_import():
        assert gc.isenabled()
    assert gc.get_freeze_count() <= before, "torch is already imported"
    monkeypatch.delitem(sys.modules, "torch")
    with gc_frozen_import():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(made)
