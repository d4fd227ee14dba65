"""What an answer says about how its request was read: ids that a model does not know, and defaults that were taken."""

from collections.abc import Iterable
from typing import Any, TypedDict

from nestrec.serving.api.answers import Done, UnknownIds, UsedDefault
from nestrec.serving.api.requests import ItemId, Unknown
from nestrec.serving.api.schema import BadRequestError

_MOST_SHOWN = 10
"""unknown ids in a refusal"""


class Said(TypedDict):
    """The notes as fields of an answer."""

    unknown: list[UnknownIds]
    defaults: list[UsedDefault]


class Notes:
    """Of one request, by all models that read it."""

    def __init__(self, policy: Unknown | None = None):
        self.policy: Unknown = policy or "last"
        self._unknown: dict[tuple[str, Done], dict[ItemId, None]] = {}
        self._defaults: dict[str, Any] = {}

    def add_unknown(self, field: str, ids: Iterable[ItemId], done: Done) -> None:
        """Raises where unknown ids are to be refused."""
        found = self._unknown.setdefault((field, done), {})
        found.update(dict.fromkeys(ids))
        if self.policy == "refuse":
            shown = ", ".join(repr(key)[:64] for key in list(found)[:_MOST_SHOWN])
            more = f" and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""
            raise BadRequestError(f"the model does not know {shown}{more}", field)

    def add_default(self, field: str, value: Any) -> None:
        self._defaults[field] = value

    def said(self) -> Said:
        return {
            "unknown": [
                {"field": field, "ids": list(ids), "done": done} for (field, done), ids in self._unknown.items()
            ],
            "defaults": [{"field": field, "value": value} for field, value in self._defaults.items()],
        }
