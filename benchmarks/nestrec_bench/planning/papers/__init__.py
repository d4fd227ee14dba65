"""Results that papers published for many devices, compared with simulations that use few of the published numbers."""

from collections.abc import Callable

from nestrec_bench.planning.papers.comparison import Comparison, PublishedResult
from nestrec_bench.planning.papers.freescale import freescale
from nestrec_bench.planning.papers.nestpipe import nestpipe
from nestrec_bench.planning.papers.turbogr import turbogr
from nestrec_bench.planning.papers.two_d import two_d

PAPERS: dict[str, Callable[[], Comparison]] = {
    "nestpipe": nestpipe,
    "2d": two_d,
    "freescale": freescale,
    "turbogr": turbogr,
}

__all__ = ["PAPERS", "Comparison", "PublishedResult"]
