"""What papers print about many devices, beside what the simulator says with few of their numbers given to it."""

from collections.abc import Callable

from nestrec.planning.papers.comparison import Comparison, Published
from nestrec.planning.papers.freescale import freescale
from nestrec.planning.papers.nestpipe import nestpipe
from nestrec.planning.papers.turbogr import turbogr
from nestrec.planning.papers.two_d import two_d

PAPERS: dict[str, Callable[[], Comparison]] = {
    "nestpipe": nestpipe,
    "2d": two_d,
    "freescale": freescale,
    "turbogr": turbogr,
}

__all__ = ["PAPERS", "Comparison", "Published"]
