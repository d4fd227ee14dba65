"""Small workloads and clusters for tests of the planner."""

from dataclasses import replace

import numpy as np

from nestrec.planning.cluster_config import load_cluster
from nestrec.planning.workload import TableLoad, Workload


def workload(batch_samples=64, rows=1_000_000, dim=64, flops=2e7, **changes):
    keys = (100.0, 10_000.0, 1_000_000.0)
    table = TableLoad(
        name="items",
        rows=rows,
        row_bytes=4 * dim + 16,
        weight_bytes=4 * dim,
        gradient_bytes=4 * dim,
        keys_per_token=2.0,
        seen_keys=keys,
        distinct_keys=(95.0, 8_000.0, 400_000.0),
    )
    lengths = tuple(float(v) for v in np.geomspace(4, 400, 65))
    tables = Workload(
        name="synthetic",
        batch_samples=batch_samples,
        lengths=lengths,
        tables=(table,),
        dense_parameters=100_000,
        flops_per_token=flops,
        flops_per_token_squared=flops / 300,
        activation_bytes_per_token=2_000.0,
    )
    return replace(tables, **changes)


def cpu_cluster(hosts=2, ranks=2, cores=8, **changes):
    base = load_cluster("cpu-hosts")
    host = replace(base.host, ranks=ranks, cores=cores, **changes)
    return replace(base, hosts=hosts, host=host)


def gpu_cluster(hosts=2, **changes):
    return replace(load_cluster("h100-ib400"), hosts=hosts, **changes)
