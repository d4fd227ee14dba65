"""A work's share of a batch."""

from dataclasses import dataclass

from nestrec.serving.engine.runner import Part
from nestrec.serving.engine.work import Work
from nestrec.serving.model.inputs import Candidates
from nestrec.serving.prefix.cache import Entry
from nestrec.serving.prefix.tiers import PrefixTiers


@dataclass(frozen=True, slots=True)
class EngineStep:
    """Its entry is pinned until the batch has ended."""

    work: Work
    part: Part
    entry: Entry | None
    is_last: bool
    """nothing is left of the work after this step"""

    @staticmethod
    def make(
        tiers: PrefixTiers, work: Work, entry: Entry | None, *, end: int, candidates: Candidates | None, is_last: bool
    ) -> "EngineStep":
        """Pin or make the user's entry, with room for what can be kept of the tokens before `end`."""
        first = entry.length if entry is not None else 0
        entry, store_until = tiers.reserve(work, entry, min(work.tokens.num_cacheable, end))
        pages = list(entry.pages) if entry is not None else []
        part = Part(
            tokens=work.tokens, first=first, end=end, pages=pages, store_until=store_until, candidates=candidates
        )
        return EngineStep(work, part, entry, is_last)

    @property
    def is_kept(self) -> bool:
        """What can be cached of it will be there for the next step."""
        return self.part.store_until >= min(self.part.end, self.work.tokens.num_cacheable)
