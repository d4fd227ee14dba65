"""What happens when a window of a run has ended."""

from collections.abc import Callable
from dataclasses import dataclass

from nestrec.training.session import Session
from nestrec.training.state import TrainState


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowEnd:
    """A window has been predicted and trained on, and the state after it is on the disk."""

    session: Session
    """data, tables and dense weights as they are now; nothing is in flight"""
    state: TrainState
    """`state.step` names the checkpoint"""
    number: int
    """of the window in this run, from 0"""
    from_ms: int
    """time of its first event"""
    to_ms: int
    """time of its last event"""
    num_events: int
    """of the window"""
    read_at_s: float | None = None
    """when its newest event was read from a stream, in seconds since 1970; none where there is no stream"""
    first_at_s: float | None = None
    """when its oldest event came to the source, likewise"""
    mean_at_s: float | None = None
    """the mean over its events"""
    closed_at_s: float | None = None
    """when it was closed"""
    is_restart: bool = False
    """the run was started again and stands at the end of this window: a kill may have come before the hooks were
    called, or after"""


WindowHook = Callable[[WindowEnd], None]
"""Called on every rank, in the order of the collectives; what it does must be the same when it is done twice."""
