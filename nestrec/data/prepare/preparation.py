"""`prepare`: from the files of a format to a dataset."""

from pathlib import Path
from typing import Any

from nestrec.base.errors import UserError
from nestrec.base.paths import given_path
from nestrec.data.card import Card
from nestrec.data.formats.registry import FORMATS, given_options
from nestrec.data.prepare.progress import Progress, silent
from nestrec.data.prepare.source import ArrowTable, given_input


def prepare(
    format: str,
    input: Path | str | ArrowTable,
    output: Path | str,
    *,
    options: Any = None,
    progress: Progress = silent,
    **given: Any,
) -> Card:
    """Write the dataset of `input` to the folder `output`; its card.

    `input` is a path, for `synthetic` a preset's name, or for `log` an Arrow table or a DataFrame: anything that gives
    its columns as Arrow (`__arrow_c_stream__`).

    Options are given by name (`user_core=5`, `log={"user": "uid"}`, `**{"log.user": "uid"}` as on the command line), or
    all of them as the format's own config, `FORMATS[format].options`.
    The folder appears whole or not at all.
    """
    found = FORMATS.find(format, field="format")
    folder = given_path(output, "output")
    if options is not None and (given or not isinstance(options, found.options)):
        remedy = f"give a {found.options.__name__}, or options by name"
        raise UserError(
            "are not the options of this format", field="options", value=type(options).__name__, remedy=remedy
        )
    options = options or given_options(format, given)
    with given_input(input, "input") as source:
        card = found.prepare(str(source), folder, options, progress)
    if not isinstance(card, Card):
        raise FORMATS.broken(format, "prepare", f"gives {card!r} and no card of what it wrote")
    return card
