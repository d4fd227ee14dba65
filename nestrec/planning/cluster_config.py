"""Cluster description for the planner: hosts, devices, links and measured operation costs.

A cluster is read from a TOML file (format: docs/planning.md), from one of the files in the package, or from the machine
of this process as torchrun has divided it among ranks.
"""

import os
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from nestrec.base.config import config
from nestrec.base.config_values import Count, NonNegative, Positive, from_plain
from nestrec.base.errors import UserError, did_you_mean, require
from nestrec.planning.hardware_profile import Link, Links, Profile

GIB = 2**30


@config
class DeviceConfig:
    """Compute device of one rank."""

    kind: Literal["cuda", "cpu"]
    """Device type; on `cpu` a rank has only the memory of its host."""
    memory_gib: Positive
    """Memory of one device in GiB; for a CPU the share of the host memory that a rank can use."""
    peak_tflops: Positive
    """Peak throughput of dense matrix products in the training precision in TFLOP/s, the reference for MFU."""
    reserved_gib: NonNegative = 0.0
    """Device memory in GiB that the runtime occupies: CUDA contexts, communication buffers, fragmentation."""
    collective_slowdown: NonNegative = 0.0
    """Relative slowdown of kernels while collectives run on the same multiprocessors, for example 0.1 for 10%."""


@config
class HostConfig:
    """One host, which its ranks share."""

    ranks: Count
    """Number of devices per host; each is one rank."""
    cores: Count
    """Number of CPU cores per host, shared by its ranks."""
    memory_gib: Positive
    """Memory of a host in GiB, for tables in DRAM and host buffers of the ranks."""
    disk_gib: NonNegative = 0.0
    """Disk space of a host in GiB for disk stores; 0 disables them."""
    core_contention: NonNegative = 0.0
    """Relative slowdown of work while more lanes are active than the host has cores."""
    host_copy_gb_per_s: NonNegative = 0.0
    """Bandwidth of one rank in GB/s for transfers through host memory; 0 disables this transport."""


@config
class ClusterConfig:
    """A cluster of equal hosts."""

    name: str
    """Name of the cluster in plans and reports."""
    hosts: Count
    """Number of equal hosts."""
    device: DeviceConfig
    """Device of each rank."""
    host: HostConfig
    """Configuration of each host."""
    links: tuple[Link, ...]
    """Levels of the link hierarchy from the innermost to the outermost."""
    profile: Profile
    """Costs of the operations of a step."""

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.hosts * self.host.ranks

    @property
    def shares_cores(self) -> bool:
        """Whether a host can have more active lanes than cores."""
        return self.device.kind == "cpu" and self.host.cores < 2 * self.host.ranks

    def link_model(self) -> Links:
        """Return the cost model of the links."""
        return Links(self.links)


def load_cluster(name: str) -> ClusterConfig:
    """Load a cluster description.

    Args:
        name: Path of a .toml file, or name of a cluster in the package (see `cluster_names`).

    Raises:
        UserError: The file or name does not exist, or the file is invalid.
    """
    path = Path(name)
    if path.suffix == ".toml":
        require(path.exists(), "the file does not exist", option="--cluster", value=name, remedy="see docs/planning.md")
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            remedy = "use a UTF-8 text file, see docs/planning.md"
            raise UserError(
                f"the file cannot be read: {error}", option="--cluster", value=name, remedy=remedy
            ) from error
    else:
        known = cluster_names()
        if name not in known:
            remedy = f"{did_you_mean(name, known)}, or the path of a .toml file"
            raise UserError("unknown cluster", option="--cluster", value=name, remedy=remedy)
        text = (resources.files("nestrec.planning") / "clusters" / f"{name}.toml").read_text()
    return cluster_from_dict(parse(text, name))


def cluster_names() -> list[str]:
    """Return the names of the clusters in the package."""
    folder = resources.files("nestrec.planning") / "clusters"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def parse(text: str, name: str) -> dict[str, Any]:
    """Parse the TOML text of a cluster file; `name` is that of the file, for errors."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(
            f"invalid TOML: {error}", option="--cluster", value=name, remedy="see docs/planning.md"
        ) from error


def cluster_from_dict(plain: dict[str, Any]) -> ClusterConfig:
    """Build a cluster from the contents of a cluster file; every name, type and range is validated."""
    cluster = from_plain(ClusterConfig, plain)
    if not cluster.links or cluster.links[-1].ranks != 0:
        raise UserError(
            "the outermost level must join all ranks",
            option="links",
            value=len(cluster.links),
            remedy="set ranks = 0 in the last [[links]] table",
        )
    return cluster


def this_machine(*, uses_cuda: bool) -> ClusterConfig:
    """Describe this machine: its memory and cores, with links and operation costs of the files in the package."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    hosts = max(1, int(os.environ.get("WORLD_SIZE", "1")) // local)
    host_gib = psutil.virtual_memory().total / GIB
    if uses_cuda:
        known = load_cluster("h100-ib400")
        total = torch.cuda.get_device_properties(0).total_memory / GIB
        device = DeviceConfig(
            kind="cuda", memory_gib=total, peak_tflops=known.device.peak_tflops, reserved_gib=known.device.reserved_gib
        )
    else:
        known = load_cluster("cpu-hosts")
        device = DeviceConfig(kind="cpu", memory_gib=host_gib / local, peak_tflops=known.device.peak_tflops)
    disk_gib = psutil.disk_usage(os.getcwd()).free / GIB
    host = HostConfig(ranks=local, cores=os.cpu_count() or 1, memory_gib=host_gib, disk_gib=disk_gib)
    outermost: Link = known.links[-1]
    return ClusterConfig(
        name="this machine", hosts=hosts, device=device, host=host, links=(outermost,), profile=known.profile
    )
