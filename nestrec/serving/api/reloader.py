"""Other models while the old ones serve: one load after another, and the last one asked for wins.

A model is looked through and warmed up beside the one in service; where it will not do, that one stays. The folder that
was in service before is remembered, so that a rollback needs no name.
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nestrec.base.errors import UserError
from nestrec.serving.api.process.serially import Serially
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.tables import TablesConfig
from nestrec.serving.service import Service, role_of

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is or was in service."""

    folder: Path
    """with no link in it: what a link points to may change"""
    version: str


class Reloader:
    """Thread safe; what is asked by a signal is done on a thread of its own."""

    def __init__(self, service: Service, device: str, tables: TablesConfig):
        self._service, self._device, self._tables = service, device, tables
        self._lock = threading.Lock()
        self.current = {
            role: LoadedModel(folder.resolve(), service.fleet(role).servable.version)
            for role, folder in service.sources.items()
        }
        """by role"""
        self.previous: Mapping[str, LoadedModel] = {}
        """what the last swap has replaced, by role"""
        self._turns = Serially("nestrec-reload", self._reload_all)

    def ask(self) -> None:
        """Load the folders that the server was started with anew, soon."""
        self._service.reloads.asked += 1
        self._turns.ask()

    def close(self) -> None:
        self._turns.close()

    def swap(self, folders: Sequence[Path]) -> None:
        """Serve the models of these folders, one of each role that is served, or fewer. `UserError` where one will not
        do, and all stay as they are."""
        with self._lock:
            self._swap([(folder, None) for folder in folders])

    def rollback(self) -> None:
        """Serve what was served before the last swap."""
        with self._lock:
            if not self.previous:
                remedy = "name a model to swap to"
                raise UserError("has had no other model yet", field="server", value="rollback", remedy=remedy)
            self._swap([(loaded.folder, loaded.version) for loaded in self.previous.values()])

    def _reload_all(self) -> None:
        reloads = self._service.reloads
        asked = reloads.asked
        try:
            self.swap(list(self._service.sources.values()))
            reloads.is_refused = False
        except Exception as error:  # whatever is wrong with them, the old models serve on
            is_told = isinstance(error, UserError | OSError)
            _LOG.error("the model stays as it is: %s", error, exc_info=None if is_told else error)
            reloads.is_refused = True
        reloads.done = asked

    def _swap(self, wanted: Sequence[tuple[Path, str | None]]) -> None:
        """wanted: folders, and the versions that they must hold."""
        fresh: dict[str, Servable] = {}
        current, seen = dict(self.current), set[str]()
        for given, version in wanted:
            # Where the folder is a link, all files come from what it points to now, wherever it points meanwhile.
            folder = given.resolve()
            servable = Servable.load(folder, self._device, self._tables)
            role = role_of(servable)
            if role not in self._service.fleets or role in seen:
                raise _other_role(role, list(self._service.fleets), given)
            seen.add(role)
            if version is not None and servable.version != version:
                remedy = "name the model to swap to"
                raise UserError("does not hold the model of that time", field="model", value=str(given), remedy=remedy)
            old = self._service.fleet(role).servable.version
            if servable.version == old:
                _LOG.info("the %s model is %s already", role, old[:12])
                continue
            fresh[role], current[role] = servable, LoadedModel(folder, servable.version)
        if not fresh:
            return
        self._service.swap(*fresh.values())
        self.previous = {role: loaded for role, loaded in self.current.items() if role in fresh}
        self.current = current
        for role, loaded in self.previous.items():
            new = current[role].version
            _LOG.info("the %s model %s has taken over from %s", role, new[:12], loaded.version[:12])


def _other_role(found: str, roles: Sequence[str], folder: Path) -> UserError:
    remedy = f"put a {' and a '.join(roles)} model there, or start a server of the {found} model"
    return UserError(f"holds a {found} model now", field="--model", value=str(folder), remedy=remedy)
