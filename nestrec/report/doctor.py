"""What this machine can do: each part of the software tried in earnest, with the remedy where it is absent or broken.

A check returns a finding; whatever it raises becomes the finding that the part is broken. Checks that import foreign
packages or need privileges run in processes of their own, so that nothing they do can harm this one.

The checks behind `nestrec doctor`: each tries a part of the software or the machine and says what it found.

A probe raises `NotInstalledError` where the part is not there, and anything else where it is there and does not work.
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

_IMPORT_LIMIT_S = 10
_COMMAND_LIMIT_S = 5
_GIB = 1 << 30
SERVING_PACKAGES = ("uvicorn", "httptools", "uvloop", "orjson", "prometheus_client")
"""As the extra `serve` of the package names them."""

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
"""Small extras of the package with their distributions."""


class NotInstalledError(Exception):
    """Not there; the message says what was looked for."""


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
        raise RuntimeError("a table did not survive Parquet")
    return f"{pyarrow.__version__}, Parquet written and read"


def gloo() -> str:
    """Two ranks in two threads sum a tensor; no global process group is touched."""
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
        raise NotInstalledError(f"{version} is there, but no GPU")
    return f"{version}, {torch.cuda.device_count()} GPU(s) to connect"


def symmetric_memory() -> str:
    import torch

    if not torch.cuda.is_available():
        raise NotInstalledError("no GPU")
    from nestrec.base import compat

    compat.symmetric_memory().empty(64, device=torch.device("cuda"))
    return "memory was allocated"


def limited_links() -> str:
    """A network namespace with a limited link, made and lost within one short process."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        raise NotInstalledError("not root")
    missing = [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]
    if missing:
        raise NotInstalledError(f"no command {', '.join(missing)}")
    script = (
        "ip link add doctor0 type veth peer name doctor1 && "
        "tc qdisc add dev doctor0 root tbf rate 100mbit burst 1mb latency 50ms"
    )
    _command(["unshare", "--net", "sh", "-c", script])
    return "a namespace with a link of 100 Mbit/s was made"


def tensorboard() -> str:
    return _imported("tensorboard")


def torchrec() -> str:
    return _imported("torchrec")


def serving() -> str:
    """Every package of the extra `serve`, in a process of its own."""
    return ", ".join(f"{package} {_imported(package)}" for package in SERVING_PACKAGES)


def ray() -> str:
    return _imported("ray")


def extra(name: str) -> str:
    """Return the versions of the distributions of an extra, which are not imported: that takes seconds."""
    found = []
    for distribution in EXTRAS[name]:
        try:
            found.append(f"{distribution} {importlib.metadata.version(distribution)}")
        except importlib.metadata.PackageNotFoundError:
            raise NotInstalledError(f"{distribution} is not installed") from None
    return ", ".join(found)


def _imported(package: str) -> str:
    """Version of a package that another process could import."""
    if importlib.util.find_spec(package) is None:
        raise NotInstalledError(f"{package} is not installed")
    code = f"import {package}; print(getattr({package}, '__version__', 'of unknown version'))"
    return _command([sys.executable, "-c", code], limit_s=_IMPORT_LIMIT_S).splitlines()[-1]


def _sum_over_gloo(store_path: str, rank: int) -> float:
    import torch
    from torch.distributed import FileStore, ProcessGroupGloo

    group = ProcessGroupGloo(FileStore(store_path, 2), rank, 2, timedelta(seconds=_COMMAND_LIMIT_S))
    tensor = torch.tensor([rank + 1.0])
    group.allreduce([tensor]).wait()  # type: ignore[attr-defined]
    return tensor.item()


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return next(iter(_command(query).splitlines()), "").strip()


def _command(words: list[str], limit_s: float = _COMMAND_LIMIT_S) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=limit_s, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise RuntimeError(f"{words[0]} failed with code {done.returncode}: {last}")
    return done.stdout


Status = Literal["ok", "absent", "broken"]
_STYLE: dict[Status, str] = {"ok": "green", "absent": "yellow", "broken": "bold red"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that was looked for."""

    name: str
    """What it is."""
    status: Status
    """`absent` things are optional; `broken` ones are there and do not work."""
    detail: str
    """What was found."""
    remedy: str = ""
    """What is missing without it, and how to get it; empty where it is ok."""


@dataclass(frozen=True, slots=True)
class _Check:
    name: str
    probe: Callable[[], str]
    remedy: str
    runs_apart: bool = False
    """works in a process of its own, so that it can run beside the others"""


_CHECKS = (
    _Check("Python", python, "nestrec needs Python 3.11 or newer"),
    _Check("PyTorch", pytorch, "nothing runs without it: `pip install --force-reinstall torch`"),
    _Check("CPU", cpu, "cores and memory could not be read; everything else works"),
    _Check("Disk", disk, "datasets and checkpoints need room: free some, or write to another disk"),
    _Check("CUDA", cuda, "training and kernels run on the CPU; install a driver and a CUDA build of PyTorch"),
    _Check("Triton", triton, "no kernels, reference operators are used; needs a GPU and `pip install triton`"),
    _Check("numba", numba, "host loops need it: `pip install --force-reinstall numba`"),
    _Check("pyarrow", pyarrow, "datasets cannot be read without it: `pip install --force-reinstall pyarrow`"),
    _Check("Gloo", gloo, "no multi-process runs on CPU; try GLOO_SOCKET_IFNAME=lo"),
    _Check("NCCL", nccl, "no multi-GPU runs; comes with CUDA builds of PyTorch"),
    _Check("Symmetric memory", symmetric_memory, "no `copy_engine` exchange; needs a CUDA build and a GPU"),
    _Check("Limited links", limited_links, "no benchmarks over them; needs root, `ip` and `tc`", True),
    _Check("TensorBoard", tensorboard, "no TensorBoard files: `pip install tensorboard`", True),
    _Check("TorchRec", torchrec, "no conversion to it, no comparison with it: `make torchrec`", True),
    _Check("Serving", serving, "no `nestrec serve`: `pip install 'nestrec[serve]'`", True),
    _Check("Ray", ray, "no `nestrec serve --front ray`: `pip install 'nestrec[ray]'`", True),
    *(
        _Check(f"Extra {name}", partial(extra, name), f"{without}: `pip install 'nestrec[{name}]'`")
        for name, without in (
            ("redis", "no histories in Redis (`nestrec serve --histories redis://...`)"),
            ("addresses", "no versions in object storage (`--publish.address s3://...`), only in folders"),
            ("kafka", "no streams from Kafka (`nestrec follow kafka://...`)"),
            ("faiss", "no approximate search (`nestrec export --search.kind faiss_hnsw`)"),
            ("client", "no Python client of a server (`nestrec.client`)"),
            ("otel", "no spans of requests (`nestrec serve --tracing.otlp ...`)"),
            ("trees", "no gradient-boosted trees among the baselines of ranking"),
            ("tune", "no search for options (`nestrec tune`)"),
        )
    ),
)


def examine() -> list[Finding]:
    """Look at everything; takes a few seconds and never raises."""
    with ThreadPoolExecutor(max_workers=len(_CHECKS)) as pool:
        apart = {check.name: pool.submit(_examine_one, check) for check in _CHECKS if check.runs_apart}
        # The others import big packages into this process, which threads would only do at each other's expense.
        here = {check.name: _examine_one(check) for check in _CHECKS if not check.runs_apart}
        return [here.get(check.name) or apart[check.name].result() for check in _CHECKS]


def doctor_table(findings: Sequence[Finding]) -> Table:
    """Findings for the terminal."""
    table = Table(title="What this machine can do", title_justify="left")
    for head in ("part", "status", "found"):
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
    except Exception as error:  # any failure of a part is what is being looked for
        detail = f"{type(error).__name__}: {error}".splitlines()[0]
        return Finding(name=check.name, status="broken", detail=detail, remedy=check.remedy)
