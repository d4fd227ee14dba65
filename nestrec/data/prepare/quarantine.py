"""Bad input rows: written to `quarantine.csv` with reason and line, counted, and an error when there are too many."""

import csv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from nestrec.base.errors import DataError
from nestrec.data.card import DataFile, describe_file
from nestrec.data.prepare.parse import ABOUT_TIME, AHEAD, NOT_A_NUMBER
from nestrec.data.prepare.raw import BadRow

QUARANTINE_FILE = "quarantine.csv"
TEXT_CHARACTERS = 500
"""Longer rows are cut in the file."""


class Quarantine:
    """Collects bad rows of all input files."""

    def __init__(self, folder: Path):
        self.reasons: Counter[str] = Counter()
        self._path = folder / QUARANTINE_FILE
        self._example = ""

    @property
    def num_rows(self) -> int:
        return self.reasons.total()

    def add(self, file: str, rows: Sequence[BadRow]) -> None:
        if not rows:
            return
        with self._path.open("a", newline="", encoding="utf-8") as stream:
            writer = csv.writer(stream)
            if not self.num_rows:
                writer.writerow(["file", "line", "reason", "text"])
                self._example = f"{file}, line {rows[0].line}: {rows[0].reason}: {rows[0].text[:80]!r}"
            writer.writerows([file, row.line, row.reason, row.text[:TEXT_CHARACTERS]] for row in rows)
        self.reasons.update(row.reason for row in rows)

    def check(self, num_rows_read: int, max_bad_share: float, num_bad_before: int = 0, time_hint: str = "") -> None:
        """Raise if, after the first `num_bad_before` bad rows, more than `max_bad_share` of the rows read are bad.

        time_hint: what to do about times, where most of the rows are bad because of theirs.
        """
        num_bad = self.num_rows - num_bad_before
        if num_bad <= max_bad_share * num_rows_read:
            return
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in self.reasons.most_common())
        raise DataError(
            f"{num_bad:,} of {num_rows_read:,} rows are bad ({reasons}); the first is {self._example}",
            field="max_bad_share",
            value=max_bad_share,
            remedy=self._remedy(time_hint),
        )

    def _remedy(self, time_hint: str) -> str:
        check, most = "check the format and its columns", self.reasons.most_common(1)[0][0]
        if most in ABOUT_TIME and time_hint:
            check = time_hint
        elif most == AHEAD:
            check = "say what the times are (--log.time_unit), or let later ones pass (--log.max_ahead_s)"
        elif most in ABOUT_TIME:
            check = (
                "say what the times of a log are (--log.time_unit s, ms, us, ns, or iso for dates such as "
                "2026-10-25T12:00:00+02:00)"
            )
        elif most.endswith(NOT_A_NUMBER):
            check = "write numbers as 1234.5, without signs of thousands, currencies and units"
        return f"{check}, or allow more bad rows with --max_bad_share 1"

    def files(self) -> list[DataFile]:
        """The entry of the file, if there is one."""
        if not self.num_rows:
            return []
        return [describe_file(self._path.parent, self._path, self.num_rows)]
