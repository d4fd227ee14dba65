"""What this machine can do: each part of the software tried in earnest, with the remedy where it is absent or broken.

A check returns a finding; whatever it raises becomes the finding that the part is broken. Checks that import foreign
packages or need privileges run in processes of their own, so that nothing they do can harm this one.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal

from rich.table import Table
from rich.text import Text

from nestrec.report import probes

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
    _Check("Python", probes.python, "nestrec needs Python 3.11 or newer"),
    _Check("PyTorch", probes.pytorch, "nothing runs without it: `pip install --force-reinstall torch`"),
    _Check("CPU", probes.cpu, "cores and memory could not be read; everything else works"),
    _Check("Disk", probes.disk, "datasets and checkpoints need room: free some, or write to another disk"),
    _Check("CUDA", probes.cuda, "training and kernels run on the CPU; install a driver and a CUDA build of PyTorch"),
    _Check("Triton", probes.triton, "no kernels, reference operators are used; needs a GPU and `pip install triton`"),
    _Check("numba", probes.numba, "host loops need it: `pip install --force-reinstall numba`"),
    _Check("pyarrow", probes.pyarrow, "datasets cannot be read without it: `pip install --force-reinstall pyarrow`"),
    _Check("Gloo", probes.gloo, "no multi-process runs on CPU; try GLOO_SOCKET_IFNAME=lo"),
    _Check("NCCL", probes.nccl, "no multi-GPU runs; comes with CUDA builds of PyTorch"),
    _Check("Symmetric memory", probes.symmetric_memory, "no `copy_engine` exchange; needs a CUDA build and a GPU"),
    _Check("Limited links", probes.limited_links, "no benchmarks over them; needs root, `ip` and `tc`", True),
    _Check("TensorBoard", probes.tensorboard, "no TensorBoard files: `pip install tensorboard`", True),
    _Check("TorchRec", probes.torchrec, "no conversion to it, no comparison with it: `make torchrec`", True),
    _Check("Serving", probes.serving, "no `nestrec serve`: `pip install 'nestrec[serve]'`", True),
    _Check("Ray", probes.ray, "no `nestrec serve --front ray`: `pip install 'nestrec[ray]'`", True),
    *(
        _Check(f"Extra {name}", partial(probes.extra, name), f"{without}: `pip install 'nestrec[{name}]'`")
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
    except probes.Absent as absence:
        return Finding(name=check.name, status="absent", detail=str(absence), remedy=check.remedy)
    except Exception as error:  # any failure of a part is what is being looked for
        detail = f"{type(error).__name__}: {error}".splitlines()[0]
        return Finding(name=check.name, status="broken", detail=detail, remedy=check.remedy)
