import gc
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from nestrec.base.process import loading

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_TENSOR_BYTES = 1 << 26
_FAULTS_OF_A_LARGE_TENSOR = f"""
import resource
from nestrec.base.process import ask_for_huge_pages
ask_for_huge_pages()
import torch
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.ones({_TENSOR_BYTES // 4})
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(**environment: str) -> int:
    command = [sys.executable, "-c", _FAULTS_OF_A_LARGE_TENSOR]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)


@pytest.mark.skipif(
    not _SETTING.exists() or "[madvise]" not in _SETTING.read_text(), reason="huge pages are not given on request here"
)
@pytest.mark.slow
def test_large_tensors_come_on_huge_pages_unless_the_user_says_no() -> None:
    small_pages = _TENSOR_BYTES // resource.getpagesize()
    path = {"PYTHONPATH": ":".join(sys.path)}
    assert _faults(**path) < small_pages / 4
    assert _faults(**path, THP_MEM_ALLOC_ENABLE="0") >= small_pages


def test_what_is_made_while_modules_load_is_not_looked_through_for_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys)
    before = gc.get_freeze_count()
    with loading():
        assert gc.isenabled()
    assert gc.get_freeze_count() <= before, "torch is there already"
    monkeypatch.delitem(sys.modules, "torch")
    with loading():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(made)
