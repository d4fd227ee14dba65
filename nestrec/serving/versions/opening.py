"""Models of an address: the newest version, or one that is named as ADDRESS@VERSION."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from nestrec.base.errors import DamagedError, UserError
from nestrec.checkpoint.places import Place, place_of
from nestrec.serving.model.spec import MANIFEST_FILE
from nestrec.serving.model.tables import TablesConfig
from nestrec.serving.versions.followed import Followed
from nestrec.serving.versions.manifest import NEWEST_FILE, VERSIONS
from nestrec.serving.versions.reader import READ_TIMEOUT_S, Versions

_NAMED = re.compile(r"(.+)@([0-9a-f]{1,64}|[0-9]{8}-[0-9a-f]{0,8})")
"""an address, and the beginning of a version's name or digest"""


@dataclass(frozen=True, slots=True)
class Source:
    """Where versions of a model come from."""

    address: str
    version: str | None = None
    """the one that is to stay; none: the newest"""

    @property
    def place(self) -> Place:
        return place_of(self.address)

    def at(self, version: str | None) -> "Source":
        return replace(self, version=version)

    def __str__(self) -> str:
        return self.address if self.version is None else f"{self.address}@{self.version}"


def source_of(text: str) -> Source | None:
    """The address of versions that a text names; none where it names a folder that `nestrec export` wrote."""
    named = _NAMED.fullmatch(text)
    address, version = (named[1], named[2]) if named else (text, None)
    if "://" in address:
        return Source(address, version)
    folder = Path(address).resolve()
    is_published = (folder / NEWEST_FILE).exists() or (folder / VERSIONS).is_dir()
    is_one = is_published and not (folder / MANIFEST_FILE).exists()
    return Source(str(folder), version) if is_one else None


def open_source(
    source: Source,
    device: torch.device | str = "cpu",
    tables: TablesConfig | None = None,
    scratch: Path | None = None,
    read_timeout_s: float = READ_TIMEOUT_S,
) -> Followed:
    """The newest version that can be read, or the one that is named. A `UserError` where there is none."""
    versions = Versions(source.place, read_timeout_s)
    problem = "holds no version yet"
    for at in versions.published() if source.version is None else [versions.find(source.version)]:
        try:
            return Followed.open(versions, versions.way_from_full(at), device, tables, scratch)
        except (DamagedError, FileNotFoundError) as error:
            problem = f"holds no version that can be read: {error}"
    remedy = "publish one: nestrec publish RUN ADDRESS"
    raise UserError(problem, field="address", value=source.address, remedy=remedy)
