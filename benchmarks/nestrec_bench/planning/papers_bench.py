"""What papers print about many devices beside what the simulator says, and what had to be assumed.

nestrec bench papers nestpipe
"""

from collections.abc import Generator, Iterator, Sequence

from nestrec.base.config import config
from nestrec.base.errors import UserError, did_you_mean
from nestrec_bench.bench import Bench, More, Row, Shown
from nestrec_bench.planning.papers import PAPERS


@config
class PapersBench:
    papers: tuple[str, ...] = tuple(PAPERS)
    """papers whose tables are simulated; none given: all"""


def measure_papers(bench: PapersBench) -> Generator[Row, None, More]:
    """A row for each figure that a paper prints."""
    assumptions = []
    for paper in bench.papers:
        if paper not in PAPERS:
            raise UserError("is no known paper", option="PAPER", value=paper, remedy=did_you_mean(paper, PAPERS))
        found = PAPERS[paper]()
        yield from ({"paper": paper, **row.row()} for row in found.rows)
        assumptions += [f"{paper}: {text}" if len(bench.papers) > 1 else text for text in found.assumptions]
    return {"assumptions": assumptions}


def _show(rows: Sequence[Row], more: More) -> Iterator[Shown]:
    for paper in dict.fromkeys(row["paper"] for row in rows):
        own = [
            {k: v for k, v in row.items() if v is not None and k != "paper"} for row in rows if row["paper"] == paper
        ]
        yield f"{paper}: published and predicted", own
    yield from (f"assumed: {assumption}" for assumption in more["assumptions"])


BENCH = Bench(config=PapersBench, measure=measure_papers, show=_show, argument="papers")
