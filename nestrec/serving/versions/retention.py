"""Which versions may go: those that nobody is led to any more."""

from nestrec.base.failpoints import fail_point
from nestrec.serving.versions.manifest import VERSIONS, manifest_file
from nestrec.serving.versions.reader import Versions


def prune(versions: Versions, keep: int) -> list[str]:
    """Delete all but the last `keep` versions, what they build on down to a full one, and what lies at the address by
    chance; the names of the folders that went.

    Manifests go first: what is half deleted is not there.
    """
    kept: set[str] = set()
    for folder, version in versions.published():
        kept.add(folder)
        if len(kept) >= keep and _is_full(versions, folder, version):
            break
    else:
        return []  # what they build on may lie behind one that is damaged
    gone = [folder for folder in versions.place.folders(VERSIONS) if folder not in kept]
    for folder in gone:
        versions.place.remove(manifest_file(folder, "delta"))
        versions.place.remove(manifest_file(folder, "full"))
        fail_point("publish.during_pruning")
        versions.place.remove(f"{VERSIONS}/{folder}")
    return gone


def _is_full(versions: Versions, folder: str, version: str) -> bool:
    try:
        versions.manifest(folder, "full", version)
    except FileNotFoundError:
        return False
    return True
