"""`prepare`: from the files of a format to a dataset."""

from pathlib import Path
from typing import Any

from nestrec.base.errors import UserError
from nestrec.base.paths import given_path
from nestrec.data.card import Card
from nestrec.data.formats.registry import FORMATS, given_options
from nestrec.data.prepare.progress import Progress, silent


def prepare(
    format: str,
    input: Path | str,
    output: Path | str,
    *,
    options: Any = None,
    progress: Progress = silent,
    **given: Any,
) -> Card:
    """Write the dataset of `input` (for `synthetic`, a preset's name) to the folder `output`; its card.

    Options are given by name (`user_core=5`, `log={"user": "uid"}`, `**{"log.user": "uid"}` as on the command line), or
    all of them as the format's own config, `FORMATS[format].options`.
    The folder appears whole or not at all.
    """
    found = FORMATS.find(format, field="format")
    folder, source = given_path(output, "output"), str(given_path(input, "input"))
    if options is not None and (given or not isinstance(options, found.options)):
        remedy = f"give a {found.options.__name__}, or options by name"
        raise UserError(
            "are not the options of this format", field="options", value=type(options).__name__, remedy=remedy
        )
    card = found.prepare(source, folder, options or given_options(format, given), progress)
    if not isinstance(card, Card):
        raise FORMATS.broken(format, "prepare", f"gives {card!r} and no card of what it wrote")
    return card
