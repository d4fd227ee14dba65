"""What a front knows of the models in service: how they call things, and nothing that computes.

Each fleet has a number. A request names the fleet that it was read with, so that no request is read with the names of
one version and computed by another.
"""

import pickle
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary, WeakValueDictionary

from torch import nn

from nestrec.serving.frontend.wire_format import By
from nestrec.serving.model.servable import Servable
from nestrec.serving.service.inference_service import ModelDeployment


@dataclass(frozen=True, slots=True, eq=False)
class RemoteDeployment(ModelDeployment):
    """A fleet of another process."""

    number: int = 0
    role: str = ""
    names_of_outputs: tuple[str, ...] = ()
    by: By = "name"

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.names_of_outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class _DeploymentNames:
    """Of one fleet."""

    number: int
    role: str
    version: str
    outputs: tuple[str, ...]
    servable: Servable | None
    """none: as that of `same_as`, but for its version and the items that have come since"""
    same_as: int = 0
    more_items: tuple[str, ...] = ()
    """names of those"""


@dataclass(frozen=True, slots=True)
class _Message:
    roles: Mapping[str, int]
    """numbers of the fleets in service"""
    new: tuple[_DeploymentNames, ...]
    gone: tuple[int, ...]


class DeploymentNumbers:
    """Of the fleets of a service, as long as it has them. Any thread asks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: WeakKeyDictionary[ModelDeployment, int] = WeakKeyDictionary()
        self._fleets: WeakValueDictionary[int, ModelDeployment] = WeakValueDictionary()
        self._last = 0

    def of(self, fleet: ModelDeployment) -> int:
        with self._lock:
            number = self._numbers.get(fleet)
            if number is None:
                self._last += 1
                number = self._numbers[fleet] = self._last
                self._fleets[number] = fleet
            return number

    def find(self, number: int) -> ModelDeployment | None:
        with self._lock:
            return self._fleets.get(number)


class NameSender:
    """What one front has been told."""

    def __init__(self, numbers: DeploymentNumbers):
        self._numbers = numbers
        self._told: dict[int, Servable] = {}

    def message(self, fleets: Mapping[str, ModelDeployment], others: Iterable[ModelDeployment] = ()) -> bytes:
        """What it does not know yet of the fleets in service, and of others."""
        new = []
        for fleet in (*fleets.values(), *others):
            number = self._numbers.of(fleet)
            if number not in self._told:
                new.append(self._about(fleet, number))
                self._told[number] = _names_alone(fleet.servable)
                self._told[number].__dict__["item_ids"] = fleet.servable.item_ids
        gone = tuple(number for number in self._told if self._numbers.find(number) is None)
        for number in gone:
            del self._told[number]
        roles = {role: self._numbers.of(fleet) for role, fleet in fleets.items()}
        return pickle.dumps(_Message(roles, tuple(new), gone))

    def _about(self, fleet: ModelDeployment, number: int) -> _DeploymentNames:
        servable = fleet.servable
        same = max((other for other, told in self._told.items() if _is_grown(told, servable)), default=0)
        return _DeploymentNames(
            number=number,
            role=servable.serving.role,
            version=servable.version,
            outputs=fleet.outputs,
            servable=None if same else _names_alone(servable),
            same_as=same,
            more_items=servable.item_keys[len(self._told[same].item_keys) :] if same else (),
        )


class DeploymentNameCache:
    """What a front has been told."""

    def __init__(self) -> None:
        self.in_service: dict[str, RemoteDeployment] = {}
        """by role"""
        self.last = 0
        """largest number that it was told of"""
        self._fleets: dict[int, RemoteDeployment] = {}

    def take(self, message: bytes) -> None:
        """From whoever computes, and nobody else: it may hold any object."""
        told: _Message = pickle.loads(message)
        fleets = dict(self._fleets)
        for one in told.new:
            fleets[one.number] = self._made(one, fleets)
        self._fleets = {number: fleet for number, fleet in fleets.items() if number not in told.gone}
        self.in_service = {role: fleets[number] for role, number in told.roles.items()}
        self.last = max((self.last, *fleets))

    def find(self, number: int) -> RemoteDeployment | None:
        return self._fleets.get(number)

    @staticmethod
    def _made(told: _DeploymentNames, known: Mapping[int, RemoteDeployment]) -> RemoteDeployment:
        servable = told.servable
        if servable is None:
            servable = _grown(known[told.same_as].servable, told)
        _ = servable.item_ids  # takes a second for a million names, which the first request would wait for
        return RemoteDeployment(servable, (), number=told.number, role=told.role, names_of_outputs=told.outputs)


def _names_alone(servable: Servable) -> Servable:
    """Without weights, tables and index."""
    return replace(
        servable, model=nn.Module(), tables={}, index=None, item_columns={}, probe=None, item_titles=(), search=None,
        precision=None,
    )  # fmt: skip


def _grown(old: Servable, told: _DeploymentNames) -> Servable:
    """With what has been made of the names: a second's work for a million of them, which requests would wait for."""
    more = told.more_items
    spec = replace(old.spec, num_items=old.spec.num_items + len(more))
    servable = replace(
        old, version=told.version, spec=spec, item_keys=(*old.item_keys, *more) if more else old.item_keys
    )
    if more:
        old.item_ids.grow(more, len(old.item_keys))
    for made in ("item_ids", "column_ids"):
        servable.__dict__[made] = getattr(old, made)
    return servable


def _is_grown(old: Servable, new: Servable) -> bool:
    """A later version of the same model, to which items were added at most: versions that follow each other in the
    same memory have one map of names, which grows."""
    return (
        old.item_ids is new.item_ids
        and len(old.item_keys) <= len(new.item_keys)
        and old.spec.columns is new.spec.columns
        and replace(old.spec, step=0, num_items=0) == replace(new.spec, step=0, num_items=0)
    )
