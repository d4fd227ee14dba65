"""A span: something that ran on a lane from one time to another."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["compute", "lookup", "communication", "wait", "step", "other"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A piece of work, or a wait for one, on a lane of a rank. Times are whole nanoseconds, so sums are exact."""

    id: int
    """Unique on its rank."""
    name: str
    """Stable and dotted, as `train.embedding.exchange`."""
    kind: Kind
    """What its time counts as. A `step` span spans a whole step on its compute lane; `other` does not count."""
    lane: str
    """A lane runs its tasks in order; spans of one lane are nested or follow each other."""
    start_ns: int
    """Time of its start on the rank's clock."""
    end_ns: int
    """Time of its end."""
    rank: int = 0
    """Where it ran."""
    step: int | None = None
    """Batch that it worked for; with pipelining not always the one being computed."""
    micro_batch: int | None = None
    """Part of the batch."""
    bytes: int = 0
    """Bytes moved."""
    rows: int = 0
    """Rows of tables moved."""
    awaits: int | None = None
    """For a wait: the id of the span that it waited for the end of."""
    is_collective: bool = False
    """All ranks take part: the time before the last of them enters is straggling."""

    @property
    def start_s(self) -> float:
        return self.start_ns * 1e-9

    @property
    def end_s(self) -> float:
        return self.end_ns * 1e-9

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns
