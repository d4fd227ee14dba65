"""Dotted options as they are typed on a command line."""

import difflib
from collections.abc import Sequence

from nestrec.base.errors import UserError, did_you_mean

PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Settings of a command that takes dotted options beside its own."""


def parse_overrides(
    arguments: Sequence[str], known: Sequence[str] = (), *, joins_repeated: bool = False
) -> dict[str, str]:
    """`--a.b 3` and `--a.b=3` as {"a.b": "3"}; `known` are the command's own options, for what was meant.

    joins_repeated: what is given several times is a list, as if written with commas; otherwise the last one counts.
    """
    found: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        name, has_value, value = rest.pop(0).partition("=")
        if not name.startswith("--"):
            raise UserError(
                "does not belong to an option",
                field="argument",
                value=name,
                remedy="write --dotted.name value; a pattern of several files stands in quotes",
            )
        if not has_value:
            if not rest:
                remedy = did_you_mean(name.removeprefix("--"), known)
                raise UserError("needs a value", field=name, value="", remedy=f"write {name} VALUE; or {remedy}")
            value = rest.pop(0)
        key = name.removeprefix("--")
        found[key] = f"{found[key]},{value}" if joins_repeated and key in found else value
        if (close := difflib.get_close_matches(name.removeprefix("--"), known, n=1)) and "." not in name:
            raise UserError("no such option", field=name, value=value, remedy=f"did you mean --{close[0]}?")
    return found
