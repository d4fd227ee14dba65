"""Former names of commands and of their options, for the "did you mean" of unknown names.

They are not accepted. Former names of dotted options are in `nestrec.base.renamed_fields`.
"""

from collections.abc import Iterable, Mapping

from nestrec.base.errors import did_you_mean

FORMER_COMMANDS: Mapping[str, str] = {
    "fleet": "status",
    "follow": "train-stream",
    "key": "create-key",
    "replay": "load-test",
}
"""Maps former names of commands to the present ones."""

FORMER_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "train": {"--from": "--warm-start"},
    "tune": {"--runs": "--num-trials", "--minutes": "--time-budget-min", "--ranks": "--num-ranks"},
    "plan": {"--most": "--top"},
    "eval": {"--part": "--split"},
    "embed": {"--what": "--entity"},
}
"""Maps former names of options to the present ones, by command."""


def command_remedy(typed: str, known: Iterable[str]) -> str:
    """Return the remedy for an unknown command: its present name, a similar name, or all names."""
    if typed in FORMER_COMMANDS:
        return f"did you mean {FORMER_COMMANDS[typed]!r}?"
    return did_you_mean(typed, known)
