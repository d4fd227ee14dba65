"""Models of an address: the newest version, or one that is named."""

from pathlib import Path

import torch

from nestrec.base.errors import DamagedError, UserError
from nestrec.serving.model.spec import MANIFEST_FILE
from nestrec.serving.model.tables import TablesConfig
from nestrec.serving.versions.followed import Followed
from nestrec.serving.versions.manifest import NEWEST_FILE
from nestrec.serving.versions.places import place_of
from nestrec.serving.versions.reader import Versions


def is_published(source: str) -> bool:
    """Whether a model is named by an address of versions, not by a folder that `nestrec export` wrote."""
    if "://" in source:
        return True
    return (Path(source) / NEWEST_FILE).exists() and not (Path(source) / MANIFEST_FILE).exists()


def open_version(
    versions: Versions,
    device: torch.device | str = "cpu",
    tables: TablesConfig | None = None,
    *,
    version: str | None = None,
    scratch: Path | None = None,
) -> Followed:
    """The newest version that can be read, or the one whose name begins so. A `UserError` where there is none."""
    history = list(versions.history())
    if version is not None:
        history = [at for at in history if at[1].startswith(version)][:1]
    problem = "holds no version yet" if version is None else f"holds no version {version!r}"
    for at in history:
        try:
            return Followed.open(versions, versions.way_from_full(at), device, tables, scratch)
        except (DamagedError, FileNotFoundError) as error:
            if version is not None:
                raise
            problem = f"holds no version that can be read: {error}"
    remedy = "publish one: nestrec publish RUN ADDRESS"
    raise UserError(problem, field="address", value=versions.place.address, remedy=remedy)


def open_newest(address: str, device: torch.device | str = "cpu") -> Followed:
    """The newest version at an address."""
    return open_version(Versions(place_of(address)), device)
