"""Models loaded anew while the old ones serve: one load after another, and the last one asked for wins."""

import logging
from pathlib import Path

from nestrec.base.errors import UserError
from nestrec.serving.api.process.serially import Serially
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.tables import TablesConfig
from nestrec.serving.service import Service, role_of

_LOG = logging.getLogger(__name__)


class Reloader:
    """Loads when it is asked, on a thread of its own, and leaves a model as it is where the new one will not do."""

    def __init__(self, service: Service, device: str, tables: TablesConfig):
        self._service, self._device, self._tables = service, device, tables
        self._turns = Serially("nestrec-reload", self._reload_all)

    def ask(self) -> None:
        self._service.reloads.asked += 1
        self._turns.ask()

    def close(self) -> None:
        self._turns.close()

    def _reload_all(self) -> None:
        reloads = self._service.reloads
        asked = reloads.asked
        are_taken = [self._reload(role, folder) for role, folder in self._service.sources.items()]
        reloads.is_refused, reloads.done = not all(are_taken), asked

    def _reload(self, role: str, folder: Path) -> bool:
        """Whether the folder's model is in service now."""
        old = self._service.fleet(role).servable.version
        try:
            # Where the folder is a link, all files come from what it points to now, wherever it points meanwhile.
            servable = Servable.load(folder.resolve(), self._device, self._tables)
            if role_of(servable) != role:
                raise _other_role(role_of(servable), role, folder)
            if servable.version == old:
                _LOG.info("the %s model is %s already", role, old[:12])
                return True
            self._service.swap(servable)
        except Exception as error:  # whatever is wrong with it, the old model serves on
            is_told = isinstance(error, UserError | OSError)
            _LOG.error("the model stays as it is: %s", error, exc_info=None if is_told else error)
            return False
        _LOG.info("the %s model %s has taken over from %s", role, servable.version[:12], old[:12])
        return True


def _other_role(found: str, role: str, folder: Path) -> UserError:
    remedy = f"put a {role} model there, or start a server of the {found} model"
    return UserError(f"holds a {found} model now", field="--model", value=str(folder), remedy=remedy)
