"""The cluster that this process sees: its own machine, as torchrun has divided it."""

import os

import psutil
import torch

from nestrec.planning.cluster import GIB, ClusterConfig, DeviceConfig, HostConfig, load_cluster
from nestrec.planning.links import Link


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
