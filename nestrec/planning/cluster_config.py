"""What a cluster is made of: a TOML file, or one that comes with the package. docs/planning.md has the format.

The cluster that this process sees: its own machine, as torchrun has divided it.
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
    """What a rank computes on."""

    kind: Literal["cuda", "cpu"]
    """cpu: a rank has no memory but its host's"""
    memory_gib: Positive
    """of one device; for a CPU the part of the host's memory that a rank may use"""
    peak_tflops: Positive
    """dense products in the training precision; what MFU is a part of"""
    reserved_gib: NonNegative = 0.0
    """taken by the runtime: contexts, communication buffers, fragmentation"""
    collective_slowdown: NonNegative = 0.0
    """by what part kernels take longer beside collectives, which run on the same multiprocessors"""


@config
class HostConfig:
    """What ranks share."""

    ranks: Count
    """devices of a host, one rank each"""
    cores: Count
    """processor cores of a host, shared by its ranks"""
    memory_gib: Positive
    """memory of a host, for tables in DRAM and what the ranks keep there"""
    disk_gib: NonNegative = 0.0
    """of a host, for stores on disk"""
    crowding: NonNegative = 0.0
    """extra time of work while more lanes work than there are cores"""
    copy_gb_per_s: NonNegative = 0.0
    """of a rank, through host memory and a network driven by the host; 0: not to be used"""


@config
class ClusterConfig:
    """A cluster of equal hosts."""

    name: str
    """what plans and pages call it"""
    hosts: Count
    """how many equal hosts it has"""
    device: DeviceConfig
    """one rank"""
    host: HostConfig
    """one host"""
    links: tuple[Link, ...]
    """from the innermost level to the outermost"""
    profile: Profile
    """what operations take"""

    @property
    def world(self) -> int:
        return self.hosts * self.host.ranks

    @property
    def shares_cores(self) -> bool:
        """Whether lanes that compute may outnumber the cores of a host."""
        return self.device.kind == "cpu" and self.host.cores < 2 * self.host.ranks

    def link_model(self) -> Links:
        return Links(self.links)


def load_cluster(name: str) -> ClusterConfig:
    """A file, or a name that the package knows."""
    path = Path(name)
    if path.suffix == ".toml":
        require(path.exists(), "there is no such file", option="--cluster", value=name, remedy="see docs/planning.md")
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            remedy = "name a file of text in UTF-8, see docs/planning.md"
            raise UserError(f"cannot be read: {error}", option="--cluster", value=name, remedy=remedy) from error
    else:
        known = cluster_names()
        if name not in known:
            remedy = f"{did_you_mean(name, known)}, or the path of a .toml file"
            raise UserError("is no known cluster", option="--cluster", value=name, remedy=remedy)
        text = (resources.files("nestrec.planning") / "clusters" / f"{name}.toml").read_text()
    return cluster_of(parse(text, name))


def cluster_names() -> list[str]:
    """Clusters that come with the package."""
    folder = resources.files("nestrec.planning") / "clusters"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def parse(text: str, name: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"is no TOML: {error}", option="--cluster", value=name, remedy="see docs/planning.md") from error


def cluster_of(plain: dict[str, Any]) -> ClusterConfig:
    """Checked: every name, type and sign."""
    cluster = from_plain(ClusterConfig, plain)
    if not cluster.links or cluster.links[-1].ranks != 0:
        raise UserError(
            "the outermost level must join all ranks",
            option="links",
            value=len(cluster.links),
            remedy="give the last of them ranks = 0",
        )
    return cluster


def this_machine(*, uses_cuda: bool) -> ClusterConfig:
    """Memory and cores as they are; what operations take as the shipped files say. Links are not looked at."""
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
