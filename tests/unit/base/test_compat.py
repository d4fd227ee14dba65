import ast
import importlib
import logging
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from numba import njit
from torch import nn

from nestrec.base import compat
from nestrec.base.errors import UserError
from nestrec.ops.embedding.host_loops import compare_and_swap, prefetch_row

ROOT = Path(__file__).resolve().parents[3]


def test_compat_names_all_exist():
    for module, name in [*compat.EXIT_FUNCTIONS, *((module, name) for name, module in compat.UVICORN_NAMES.items())]:
        assert hasattr(importlib.import_module(module), name)
    found = 0
    for node in ast.walk(ast.parse(Path(compat.__file__).read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "find_private" and len(node.args) == 3:
            module, name = (ast.literal_eval(argument) for argument in node.args[:2])
            compat.find_private(module, name, "")
            found += 1
    assert found >= 9


def test_compat_error_names_the_tested_versions():
    with pytest.raises(UserError, match=r"(?s)torch=.*lacks torch\._gone, which nestrec uses.*torch 2\.13"):
        compat.find_private("torch", "_gone", "torch 2.13")
    with pytest.raises(UserError, match=r"lacks torch\._gone\.x"):
        compat.find_private("torch._gone", "x", "torch 2.13")


@pytest.mark.parametrize("version", ["0.53.9", "0.55.0", "1.0", "0.55.0rc1"])
def test_compat_rejects_untested_uvicorn(version):
    with pytest.raises(UserError, match=r"(?s)uvicorn=.*[Pp]ip install 'uvicorn>=0.54,<0.55'"):
        compat.check_uvicorn(version)


def test_compat_uvicorn_range_is_pinned():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    first, too_new = (".".join(map(str, bound)) for bound in compat.UVICORN_RANGE)
    for extra in ("serve", "ray"):
        assert f"uvicorn>={first},<{too_new}" in extras[extra]
    compat.check_uvicorn(f"{first}.7")


def test_compat_uvicorn_names_are_found():
    assert callable(compat.HttpToolsProtocol._unset_keepalive_if_required)
    assert callable(compat.FlowControl.resume_reading)
    assert compat.ServerState().connections == set()
    assert compat.STARTUP_FAILURE != 0
    with pytest.raises(AttributeError, match="Gone"):
        compat.Gone  # noqa: B018


def test_compat_stops_the_keep_alive_timer():
    class Protocol:
        is_stopped = False

        def _unset_keepalive_if_required(self):
            self.is_stopped = True

    protocol = Protocol()
    compat.stop_keep_alive_timer(protocol)
    assert protocol.is_stopped


def test_compat_foreach_functions_write_in_place():
    tensors = [torch.ones(2), torch.full((3,), 2.0)]
    compat.foreach_mul_(tensors, torch.tensor(3.0))
    assert [t.tolist() for t in tensors] == [[3.0] * 2, [6.0] * 3]
    compat.foreach_lerp_(tensors, [torch.zeros(2), torch.zeros(3)], 0.5)
    assert [t.tolist() for t in tensors] == [[1.5] * 2, [3.0] * 3]
    compat.foreach_copy_(tensors, [torch.zeros(2), torch.ones(3)])
    assert [t.tolist() for t in tensors] == [[0.0] * 2, [1.0] * 3]


def test_compat_unsaved_buffers_are_not_in_the_state():
    module = nn.Module()
    module.register_buffer("saved", torch.zeros(1))
    module.register_buffer("unsaved", torch.zeros(1), persistent=False)
    assert compat.unsaved_buffers(module) == {"unsaved"}


def test_compat_torch_modules_have_the_used_functions():
    assert callable(torch._scaled_mm)
    memory = compat.symmetric_memory()
    assert callable(memory.empty)
    assert callable(memory.rendezvous)


def test_compat_numba_intrinsics_compile():
    @njit
    def run(array):
        prefetch_row(array.reshape(2, 2), 1, 2)
        return compare_and_swap(array, 1, 5, 7), compare_and_swap(array, 2, 5, 7)

    array = np.array([4, 5, 6, 5])
    assert run(array) == (True, False)
    assert array.tolist() == [4, 7, 6, 5]


def test_compat_exit_handlers_run_once():
    code = """
import atexit, threading
from nestrec.base.compat import run_exit_handlers
atexit.register(print, "handler")
threading.Thread(target=print, args=("thread",)).start()
run_exit_handlers()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.split() == ["thread", "handler"]


def test_compat_skips_exit_functions_that_python_lacks(monkeypatch, caplog):
    monkeypatch.setattr(compat, "EXIT_FUNCTIONS", (("threading", "_gone"),))
    assert not hasattr(threading, "_gone")
    with caplog.at_level(logging.WARNING):
        compat.run_exit_handlers()
    assert "lacks threading._gone; skipping it" in caplog.text


def test_compat_import_loads_no_other_package():
    code = "import sys, nestrec.base.compat; print({'torch', 'numba', 'uvicorn', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.strip() == "set()"
