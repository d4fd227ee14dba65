"""What happens when a window of a run has ended."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nestrec.base.errors import UserError
from nestrec.base.moments import iso_moment
from nestrec.data.samples.windows import TimeWindow
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


def check_any_window(windows: Sequence[TimeWindow], start_ms: int, seen_by: Path | None) -> None:
    """Raise a UserError where no event to train on comes after the beginning.

    seen_by: the run whose newest event gave the beginning; one event of a wrong clock may be that.
    """
    if windows or not start_ms:
        return
    moment = iso_moment(start_ms)
    why = "" if seen_by is None else f", and {seen_by} has seen an event of just before then"
    raise UserError(
        f"no event to train on is from then or later{why}",
        field="windows.start",
        value=moment,
        remedy="append newer events (some of the last are held out, see task.split), or name the moment from which "
        "events are new: --windows.start",
    )


WindowHook = Callable[[WindowEnd], None]
"""Called on every rank, in the order of the collectives; what it does must be the same when it is done twice."""
