"""Compare results that papers published for many devices with predictions of the simulator, and list the assumptions.

nestrec bench papers nestpipe
"""

from collections.abc import Generator, Iterator, Sequence

from nestrec.base.config import config
from nestrec.base.errors import UserError, did_you_mean
from nestrec_bench.bench import Bench, ExtraFields, OutputPart, Row
from nestrec_bench.planning.papers import PAPERS


@config
class PapersBenchConfig:
    papers: tuple[str, ...] = tuple(PAPERS)
    """Papers whose tables are simulated."""


def measure_papers(bench: PapersBenchConfig) -> Generator[Row, None, ExtraFields]:
    """Yield one row per published figure of a paper."""
    assumptions = []
    for paper in bench.papers:
        if paper not in PAPERS:
            raise UserError("unknown paper", option="PAPER", value=paper, remedy=did_you_mean(paper, PAPERS))
        found = PAPERS[paper]()
        yield from ({"paper": paper, **row.row()} for row in found.rows)
        assumptions += [f"{paper}: {text}" if len(bench.papers) > 1 else text for text in found.assumptions]
    return {"assumptions": assumptions}


def _show(rows: Sequence[Row], more: ExtraFields) -> Iterator[OutputPart]:
    for paper in dict.fromkeys(row["paper"] for row in rows):
        own = [
            {k: v for k, v in row.items() if v is not None and k != "paper"} for row in rows if row["paper"] == paper
        ]
        yield f"{paper}: published and predicted", own
    yield from (f"assumed: {assumption}" for assumption in more["assumptions"])


BENCH = Bench(config=PapersBenchConfig, measure=measure_papers, show=_show, argument="papers")
