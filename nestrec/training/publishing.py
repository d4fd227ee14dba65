"""When a run publishes versions of its model, for servers that follow it. How is `nestrec.serving.versions`' affair."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from nestrec.base.bounds import Count, Positive
from nestrec.base.config import config
from nestrec.base.seam import resolved

if TYPE_CHECKING:
    from nestrec.training.identity import Identity
    from nestrec.training.session import Session
    from nestrec.training.windows import WindowEnd

_PUBLISHER = "nestrec.serving.versions.publisher:Publisher"


@config
class PublishConfig:
    address: str = ""
    """folder, or address that fsspec knows, where versions appear for `nestrec serve --follow`; none: nowhere"""
    every_steps: Count | None = None
    """publish so often; a run that publishes also does so at its end and when it is told to stop"""
    every_s: Positive | None = None
    """publish about so often, in seconds: after each version ranks agree on the step of the next"""
    snapshot_every: Count = 50
    """every so many versions one is also told in full, for servers that begin or have missed one"""
    keep: Count = 100
    """newest versions that stay, and what they build on; a server can be pinned to any of them"""


class Publishing(Protocol):
    """All ranks make the same calls in the same order, while nothing is in flight."""

    def is_due(self, step: int) -> bool:
        """Whether a version of this step is to be published. The same on all ranks."""
        ...

    def publish(self, session: "Session", step: int, times: Any = None) -> None:
        """What has changed is copied, and written in the background. Nothing where this step is published already."""
        ...

    def on_window(self, end: "WindowEnd") -> None:
        """The same after a window."""
        ...

    def close(self) -> None:
        """Wait until everything is written, and raise what went wrong."""
        ...


def open_publishing(
    cfg: PublishConfig,
    session: "Session",
    identity: "Identity | None",
    step: int,
    *,
    warn: Callable[[str], None],
    tell: Callable[[str], None],
) -> Publishing | None:
    """None where nothing is to be published. identity: of the run, on the first rank. step: from which it goes on.
    warn: called with what went wrong and does not end the run. tell: called with a line per published version.
    Collective."""
    if not cfg.address:
        return None
    publishing: Publishing = resolved(_PUBLISHER)(cfg, session, identity, step, warn=warn, tell=tell)
    return publishing
