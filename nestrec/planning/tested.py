"""Which combinations of a plan have been run by us on that kind of device, and which have only been reckoned with.

Tests are the record (tests/gpu/test_ranks_gpu.py), and docs/what-was-run.md. A plan may still name what has not been
run, and says so.
"""

from nestrec.planning.candidate import Candidate
from nestrec.planning.cluster import ClusterConfig

MOST_RANKS = {
    "cpu": {"collectives": 4, "host": 4},
    "cuda": {"collectives": 1, "host": 2, "copy_engine": 1},
}
"""Device to transport to the most ranks with which every schedule has been compared with `serial`."""
MOST_HOSTS = {"cpu": 4, "cuda": 1}
"""Of CPU ranks each host was a network namespace with links of its own."""
SCHEDULES = {"serial", "stale", "dual_buffer", "frozen_window", "nested", "priority", "semi_async"}


def untested(candidate: Candidate, cluster: ClusterConfig) -> str | None:
    """What of a plan nobody has run yet on such devices; none: all of it was, if on fewer samples."""
    kind, found = cluster.device.kind, []
    most = MOST_RANKS[kind].get(candidate.transport, 0)
    if cluster.world > most:
        found.append(f"{candidate.transport} between more than {most} {kind} rank{'s' if most != 1 else ''}")
    if cluster.hosts > MOST_HOSTS[kind]:
        found.append(f"{kind} ranks on more than {MOST_HOSTS[kind]} host{'s' if MOST_HOSTS[kind] != 1 else ''}")
    if candidate.schedule not in SCHEDULES:
        found.append(f"schedule {candidate.schedule}, of another package")
    return ", ".join(found) or None
