"""Whose a position is: that of one source, kept with the data beside those of sources that were read before it.

A stream that is given another source than the one it has read is refused, since nobody but its user knows whether that
is the same stream at another place or another stream.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from nestrec.base.errors import UserError
from nestrec.data.sources.source import StreamPosition

ChangedSource = Literal["refuse", "begin", "moved"]


@dataclass(frozen=True, slots=True)
class SavedPosition:
    """How far sources were read, as it lies on the card."""

    source: str
    """its identity; empty where that was not kept yet"""
    position: StreamPosition
    others: Mapping[str, StreamPosition] = field(default_factory=dict)
    """of those that were read before, by identity"""

    @staticmethod
    def of(state: Mapping[str, Any]) -> "SavedPosition":
        """That of a stream's state on a card."""
        return SavedPosition(state.get("source", ""), state.get("position", {}), state.get("others", {}))

    def to_plain(self) -> dict[str, Any]:
        return {"source": self.source, "position": self.position, "others": dict(self.others)}

    def at(self, position: StreamPosition) -> "SavedPosition":
        """The same source, read further."""
        return SavedPosition(self.source, position, self.others)

    def of_source(self, identity: str, address: str, changed: ChangedSource) -> "SavedPosition":
        """Where to go on in a source; a UserError where it is not the one that was read, and nothing is said of it."""
        if identity == self.source or not self.source:
            return SavedPosition(identity, self.position, self.others)
        if changed == "begin":
            others = {name: where for name, where in self.others.items() if name != identity}
            return SavedPosition(identity, self.others.get(identity, {}), {**others, self.source: self.position})
        if changed == "moved" and _kind(identity) == _kind(self.source):
            return SavedPosition(identity, self.position, self.others)
        if changed == "moved":
            raise UserError(
                f"is of another kind than {self.source}, which was read so far: no position of that holds here",
                field="SOURCE",
                value=address,
                remedy="read it as another stream: --changed_source begin",
            )
        raise UserError(
            f"is not what this data was fed from so far: that is {self.source}, this is {identity}",
            field="SOURCE",
            value=address,
            remedy="name that again; or, if this is the same stream at another place, go on where it stood with "
            "--changed_source moved; or, if it is another stream, begin to read it with --changed_source begin",
        )


def _kind(identity: str) -> str:
    return identity.partition(":")[0]
