"""Replicates the names of the served models (item ids, features, outputs) to the frontend workers.

A frontend worker needs the names, but no weights, to validate requests and to translate them to row ids. Each model
deployment has a number, and a request carries the number of the deployment whose names were used to decode it.
Therefore, no request is decoded with the names of one model version and computed by another. After the first message,
only the differences are sent: a version that adds items to a known one is described by its new item names.
"""

import pickle
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary, WeakValueDictionary

from torch import nn

from nestrec.serving.frontend.wire_format import ResolvedBy
from nestrec.serving.model.servable import Servable
from nestrec.serving.service.inference_service import ModelDeployment


@dataclass(frozen=True, slots=True, eq=False)
class RemoteDeployment(ModelDeployment):
    """A model deployment whose engines run in another process (the engine process)."""

    number: int = 0
    role: str = ""
    output_names: tuple[str, ...] = ()
    resolved_by: ResolvedBy = "name"

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.output_names


@dataclass(frozen=True, slots=True, kw_only=True)
class _DeploymentNames:
    """The names of one deployment, as sent to a frontend worker."""

    number: int
    role: str
    version: str
    outputs: tuple[str, ...]
    servable: Servable | None
    """Servable without weights; None if it equals that of `same_as` except for its version and its new items."""
    same_as: int = 0
    """Number of a known deployment that this one extends; 0 if `servable` is set."""
    more_items: tuple[str, ...] = ()
    """Ids of the items that were added since the deployment `same_as`."""


@dataclass(frozen=True, slots=True)
class _Message:
    roles: Mapping[str, int]
    """Numbers of the deployments in service, by role."""
    new: tuple[_DeploymentNames, ...]
    removed: tuple[int, ...]


class DeploymentNumbers:
    """Assigns numbers to the deployments of a service. Thread-safe. Holds weak references only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: WeakKeyDictionary[ModelDeployment, int] = WeakKeyDictionary()
        self._deployments: WeakValueDictionary[int, ModelDeployment] = WeakValueDictionary()
        self._last = 0

    def number_of(self, deployment: ModelDeployment) -> int:
        """Return the number of a deployment; assign the next one on the first call."""
        with self._lock:
            number = self._numbers.get(deployment)
            if number is None:
                self._last += 1
                number = self._numbers[deployment] = self._last
                self._deployments[number] = deployment
            return number

    def find(self, number: int) -> ModelDeployment | None:
        """Return the deployment with this number, or None if it no longer exists."""
        with self._lock:
            return self._deployments.get(number)


class NameSender:
    """Sender of names to one frontend worker; remembers what has been sent."""

    def __init__(self, numbers: DeploymentNumbers):
        self._numbers = numbers
        self._sent: dict[int, Servable] = {}

    def message(self, deployments: Mapping[str, ModelDeployment], others: Iterable[ModelDeployment] = ()) -> bytes:
        """Return a message with everything about these deployments that the worker does not know yet.

        Args:
            deployments: Deployments in service, by role.
            others: Further deployments that requests may still refer to.
        """
        new = []
        for deployment in (*deployments.values(), *others):
            number = self._numbers.number_of(deployment)
            if number not in self._sent:
                new.append(self._describe(deployment, number))
                self._sent[number] = _without_weights(deployment.servable)
                self._sent[number].__dict__["item_ids"] = deployment.servable.item_ids
        removed = tuple(number for number in self._sent if self._numbers.find(number) is None)
        for number in removed:
            del self._sent[number]
        roles = {role: self._numbers.number_of(deployment) for role, deployment in deployments.items()}
        return pickle.dumps(_Message(roles, tuple(new), removed))

    def _describe(self, deployment: ModelDeployment, number: int) -> _DeploymentNames:
        servable = deployment.servable
        same = max((other for other, sent in self._sent.items() if _is_extension_of(sent, servable)), default=0)
        return _DeploymentNames(
            number=number,
            role=servable.serving.role,
            version=servable.version,
            outputs=deployment.outputs,
            servable=None if same else _without_weights(servable),
            same_as=same,
            more_items=servable.item_keys[len(self._sent[same].item_keys) :] if same else (),
        )


class DeploymentNameCache:
    """The names that a frontend worker has received; counterpart of `NameSender`."""

    def __init__(self) -> None:
        self.in_service: dict[str, RemoteDeployment] = {}
        """Deployments in service, by role."""
        self.last_number = 0
        """Largest deployment number received so far."""
        self._deployments: dict[int, RemoteDeployment] = {}

    def apply(self, message: bytes) -> None:
        """Apply a message of `NameSender`. It is unpickled, so it must come from the engine process only."""
        update: _Message = pickle.loads(message)
        deployments = dict(self._deployments)
        for names in update.new:
            deployments[names.number] = self._build(names, deployments)
        self._deployments = {
            number: deployment for number, deployment in deployments.items() if number not in update.removed
        }
        self.in_service = {role: deployments[number] for role, number in update.roles.items()}
        self.last_number = max((self.last_number, *deployments))

    def find(self, number: int) -> RemoteDeployment | None:
        return self._deployments.get(number)

    @staticmethod
    def _build(names: _DeploymentNames, known: Mapping[int, RemoteDeployment]) -> RemoteDeployment:
        servable = names.servable
        if servable is None:
            servable = _extend_names(known[names.same_as].servable, names)
        _ = servable.item_ids  # built now: it takes a second for a million names, and the first request would wait
        return RemoteDeployment(servable, (), number=names.number, role=names.role, output_names=names.outputs)


def _without_weights(servable: Servable) -> Servable:
    """Return a copy of a servable without weights, tables and search index."""
    return replace(
        servable, model=nn.Module(), tables={}, index=None, item_columns={}, golden_request=None, item_titles=(),
        search=None,
        precision=None,
    )  # fmt: skip


def _extend_names(old: Servable, names: _DeploymentNames) -> Servable:
    """Return `old` as the next version, with items added.

    The lookup tables of `old` are reused: building them takes a second for a million names, and requests would wait.
    """
    more = names.more_items
    spec = replace(old.spec, num_items=old.spec.num_items + len(more))
    servable = replace(
        old, version=names.version, spec=spec, item_keys=(*old.item_keys, *more) if more else old.item_keys
    )
    if more:
        old.item_ids.grow(more, len(old.item_keys))
    for attribute in ("item_ids", "column_ids"):
        servable.__dict__[attribute] = getattr(old, attribute)
    return servable


def _is_extension_of(old: Servable, new: Servable) -> bool:
    """Return whether `new` is a later version of `old` that differs at most by added items.

    Consecutive versions that are applied in place share one growing item id map.
    """
    return (
        old.item_ids is new.item_ids
        and len(old.item_keys) <= len(new.item_keys)
        and old.spec.columns is new.spec.columns
        and replace(old.spec, step=0, num_items=0) == replace(new.spec, step=0, num_items=0)
    )
