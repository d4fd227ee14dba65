"""Environment checks of `nestrec doctor`: which packages and devices are installed, and whether they work.

Each probe uses one component and returns a description of it. A probe that raises `NotInstalledError` reports the
component as absent; any other exception reports it as broken. Probes that import packages of others or need privileges
run in subprocesses, so that they cannot affect this process.
"""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Literal

from rich.table import Table
from rich.text import Text

from nestrec.base.lazy import INSTALL_BENCHMARKS, install_extra

_IMPORT_TIMEOUT_S = 10
_COMMAND_TIMEOUT_S = 5
_GIB = 1 << 30
SERVING_PACKAGES = ("uvicorn", "httptools", "uvloop", "orjson", "prometheus_client")
"""Packages of the extra `serve`."""

EXTRAS = {
    "redis": ("redis",),
    "addresses": ("fsspec",),
    "kafka": ("confluent-kafka",),
    "faiss": ("faiss-cpu",),
    "client": ("httpx",),
    "otel": ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"),
    "trees": ("scikit-learn",),
    "tune": ("optuna",),
}
"""Distributions of the small extras."""


class NotInstalledError(Exception):
    """A component is not installed; the message names it."""


def python() -> str:
    return f"{platform.python_version()} ({platform.python_implementation()}, {platform.platform()})"


def pytorch() -> str:
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return f"{torch.__version__} ({build}), {torch.get_num_threads()} threads"


def cpu() -> str:
    import psutil

    from nestrec.base.thread_team import usable_cores

    memory = psutil.virtual_memory()
    free_gib = memory.available / _GIB
    total_gib = memory.total / _GIB
    return f"{usable_cores()} cores usable of {os.cpu_count()}, {free_gib:.1f} of {total_gib:.1f} GiB memory free"


def disk() -> str:
    usage = shutil.disk_usage(Path.cwd())
    if usage.free < _GIB:
        raise OSError(f"only {usage.free / _GIB:.2f} GiB free here")
    return f"{usage.free / _GIB:.0f} of {usage.total / _GIB:.0f} GiB free here"


def cuda() -> str:
    import torch

    if torch.version.cuda is None:
        raise NotInstalledError("PyTorch was built without CUDA")
    if not torch.cuda.is_available():
        raise NotInstalledError(f"no usable device (driver {_driver() or 'not found'})")
    devices = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        devices.append(f"{about.name}, {about.total_memory / _GIB:.0f} GiB, capability {about.major}.{about.minor}")
    torch.ones(8, device="cuda").sum().item()
    return f"{'; '.join(devices)}; driver {_driver() or 'unknown'}"


def triton() -> str:
    if importlib.util.find_spec("triton") is None:
        raise NotInstalledError("not installed")
    import torch

    if not torch.cuda.is_available():
        raise NotInstalledError("installed, but there is no GPU to compile for")
    import triton

    from nestrec.report.triton_probe import add_one

    if add_one(torch.zeros(64, device="cuda")).tolist() != [1.0] * 64:
        raise RuntimeError("a compiled kernel gave a wrong result")
    return f"{triton.__version__}, a kernel was compiled and run"


def numba() -> str:
    import numba

    def add_one(x: int) -> int:
        return x + 1

    if numba.njit(nogil=True)(add_one)(1) != 2:
        raise RuntimeError("a compiled function gave a wrong result")
    return f"{numba.__version__}, a function was compiled and run"


def pyarrow() -> str:
    import pyarrow
    import pyarrow.parquet

    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"x": [1, 2]}), sink)
    if pyarrow.parquet.read_table(pyarrow.BufferReader(sink.getvalue())).num_rows != 2:
        raise RuntimeError("a table written to Parquet was read incorrectly")
    return f"{pyarrow.__version__}, Parquet written and read"


def gloo() -> str:
    """Sum a tensor over two ranks in two threads, without a global process group."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        raise NotInstalledError("PyTorch was built without Gloo")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max_workers=2) as pool:
        sums = list(pool.map(lambda rank: _sum_over_gloo(f"{folder}/store", rank), range(2)))
    if sums != [3.0, 3.0]:
        raise RuntimeError("a sum over two ranks was wrong")
    return "two ranks summed a tensor"


def nccl() -> str:
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_nccl_available():
        raise NotInstalledError("PyTorch was built without NCCL")
    version = ".".join(str(part) for part in torch.cuda.nccl.version())
    if not torch.cuda.is_available():
        raise NotInstalledError(f"{version} is installed, but there is no GPU")
    return f"{version}, {torch.cuda.device_count()} GPU(s) to connect"


def symmetric_memory() -> str:
    import torch

    if not torch.cuda.is_available():
        raise NotInstalledError("no GPU")
    from nestrec.base import compat

    compat.symmetric_memory().empty(64, device=torch.device("cuda"))
    return "memory was allocated"


def limited_links() -> str:
    """Create a network namespace with a rate-limited link, in a short-lived process."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        raise NotInstalledError("not root")
    missing = [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]
    if missing:
        raise NotInstalledError(f"command not found: {', '.join(missing)}")
    script = (
        "ip link add doctor0 type veth peer name doctor1 && "
        "tc qdisc add dev doctor0 root tbf rate 100mbit burst 1mb latency 50ms"
    )
    _run_command(["unshare", "--net", "sh", "-c", script])
    return "created a network namespace with a link of 100 Mbit/s"


def tensorboard() -> str:
    return _import_version("tensorboard")


def torchrec() -> str:
    return _import_version("torchrec")


def serving() -> str:
    """Import every package of the extra `serve` in a subprocess."""
    return ", ".join(f"{package} {_import_version(package)}" for package in SERVING_PACKAGES)


def ray() -> str:
    return _import_version("ray")


def extra(name: str) -> str:
    """Return the versions of the distributions of an extra, without the slow import of the packages."""
    return ", ".join(f"{distribution} {_installed_version(distribution)}" for distribution in EXTRAS[name])


def benchmarks() -> str:
    """Return the version of nestrec-bench if `nestrec` can run its commands."""
    version = _installed_version("nestrec-bench")
    names = {entry.name for entry in importlib.metadata.entry_points(group="nestrec.commands")}
    if missing := {"bench", "load-test"} - names:
        raise RuntimeError(f"{version} does not register {' and '.join(sorted(missing))}; install it again")
    return version


def _installed_version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        raise NotInstalledError(f"{distribution} is not installed") from None


def _import_version(package: str) -> str:
    """Import a package in a subprocess and return its version."""
    if importlib.util.find_spec(package) is None:
        raise NotInstalledError(f"{package} is not installed")
    code = f"import {package}; print(getattr({package}, '__version__', 'of unknown version'))"
    return _run_command([sys.executable, "-c", code], limit_s=_IMPORT_TIMEOUT_S).splitlines()[-1]


def _sum_over_gloo(store_path: str, rank: int) -> float:
    import torch
    from torch.distributed import FileStore, ProcessGroupGloo

    group = ProcessGroupGloo(FileStore(store_path, 2), rank, 2, timedelta(seconds=_COMMAND_TIMEOUT_S))
    tensor = torch.tensor([rank + 1.0])
    group.allreduce([tensor]).wait()  # type: ignore[attr-defined]
    return tensor.item()


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return next(iter(_run_command(query).splitlines()), "").strip()


def _run_command(words: list[str], limit_s: float = _COMMAND_TIMEOUT_S) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=limit_s, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise RuntimeError(f"{words[0]} failed with code {done.returncode}: {last}")
    return done.stdout


Status = Literal["ok", "absent", "broken"]
_STYLE: dict[Status, str] = {"ok": "green", "absent": "yellow", "broken": "bold red"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Result of one check."""

    name: str
    """Name of the component."""
    status: Status
    """`ok`, `absent` (an optional component is not installed) or `broken` (it is installed and does not work)."""
    detail: str
    """Version or error message."""
    remedy: str = ""
    """Features that do not work without it, and how to install it; empty if the status is `ok`."""


@dataclass(frozen=True, slots=True)
class _Check:
    name: str
    probe: Callable[[], str]
    remedy: str
    uses_subprocess: bool = False
    """Whether the probe runs a subprocess, so that it can run concurrently with the others."""


_CHECKS = (
    _Check("Python", python, "nestrec needs Python 3.11 or newer"),
    _Check("PyTorch", pytorch, "required: `pip install --force-reinstall torch`"),
    _Check("CPU", cpu, "cores and memory could not be read; everything else works"),
    _Check("Disk", disk, "datasets and checkpoints need disk space: free some, or write to another disk"),
    _Check("CUDA", cuda, "training and kernels run on the CPU; install a driver and a CUDA build of PyTorch"),
    _Check("Triton", triton, "reference operators are used instead of kernels; needs a GPU and `pip install triton`"),
    _Check("numba", numba, "required by host loops: `pip install --force-reinstall numba`"),
    _Check("pyarrow", pyarrow, "required to read datasets: `pip install --force-reinstall pyarrow`"),
    _Check("Gloo", gloo, "no multi-process runs on CPU; try GLOO_SOCKET_IFNAME=lo"),
    _Check("NCCL", nccl, "no multi-GPU runs; comes with CUDA builds of PyTorch"),
    _Check("Symmetric memory", symmetric_memory, "no `copy_engine` transport; needs a CUDA build and a GPU"),
    _Check("Limited links", limited_links, "no benchmarks with limited bandwidth; needs root, `ip` and `tc`", True),
    _Check("TensorBoard", tensorboard, "no TensorBoard files: `pip install tensorboard`", True),
    _Check("TorchRec", torchrec, "no conversion to TorchRec and no comparison with it: `make torchrec`", True),
    _Check("Serving", serving, f"no `nestrec serve`; {install_extra('serve')}", True),
    _Check("Ray", ray, f"no `nestrec serve --load_balancer ray`; {install_extra('ray')}", True),
    *(
        _Check(f"Extra {name}", partial(extra, name), f"{without}; {install_extra(name)}")
        for name, without in (
            ("redis", "no histories in Redis (`nestrec serve --history_store redis://...`)"),
            ("addresses", "no published versions in object storage (`--publish.address s3://...`)"),
            ("kafka", "no streams from Kafka (`nestrec train-stream kafka://...`)"),
            ("faiss", "no approximate search (`nestrec export --search.kind faiss_hnsw`)"),
            ("client", "no Python client of a server (`nestrec.client`)"),
            ("otel", "no traces of requests (`nestrec serve --tracing.otlp_endpoint ...`)"),
            ("trees", "no baseline of gradient-boosted trees for ranking"),
            ("tune", "no hyperparameter search (`nestrec tune`)"),
        )
    ),
    _Check("nestrec-bench", benchmarks, f"no `nestrec bench` and `nestrec load-test`; {INSTALL_BENCHMARKS}"),
)


def examine() -> list[Finding]:
    """Run all checks; takes a few seconds and never raises."""
    with ThreadPoolExecutor(max_workers=len(_CHECKS)) as pool:
        in_subprocess = {check.name: pool.submit(_examine_one, check) for check in _CHECKS if check.uses_subprocess}
        # The other probes import large packages into this process; threads would not make that faster.
        in_process = {check.name: _examine_one(check) for check in _CHECKS if not check.uses_subprocess}
        return [in_process.get(check.name) or in_subprocess[check.name].result() for check in _CHECKS]


def doctor_table(findings: Sequence[Finding]) -> Table:
    """Return a console table of the findings."""
    table = Table(title="Environment", title_justify="left")
    for head in ("component", "status", "details"):
        table.add_column(head, overflow="fold")
    for finding in findings:
        status = Text(finding.status, style=_STYLE[finding.status])
        remedy = (f"\n{finding.remedy}" if finding.remedy else "", "dim")
        table.add_row(Text(finding.name), status, Text.assemble(finding.detail, remedy))
    return table


def _examine_one(check: _Check) -> Finding:
    try:
        return Finding(name=check.name, status="ok", detail=check.probe())
    except NotInstalledError as absence:
        return Finding(name=check.name, status="absent", detail=str(absence), remedy=check.remedy)
    except Exception as error:  # any failure means that the component is broken
        detail = f"{type(error).__name__}: {error}".splitlines()[0]
        return Finding(name=check.name, status="broken", detail=detail, remedy=check.remedy)
