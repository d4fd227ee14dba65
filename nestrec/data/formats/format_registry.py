"""The formats by name, and the options that each takes.

`prepare`: from the files of a format to a dataset.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nestrec.base.config_overrides import override_texts, with_overrides
from nestrec.base.errors import ErrorCollector, UserError
from nestrec.base.files import given_path
from nestrec.base.plugins import PluginRegistry
from nestrec.data.dataset_card import DatasetCard
from nestrec.data.formats.format_spec import FormatSpec
from nestrec.data.prepare.log_source import ArrowTable, given_input
from nestrec.data.prepare.prepare_options import Progress, silent

FORMATS: PluginRegistry[FormatSpec] = PluginRegistry(
    "nestrec.formats",
    "format",
    {
        "log": "nestrec.data.formats.log_format:FORMAT",
        "movielens": "nestrec.data.formats.movielens:FORMAT",
        "amazon_csv": "nestrec.data.formats.amazon:FORMAT",
        "kuairand": "nestrec.data.formats.kuairand:FORMAT",
        "criteo": "nestrec.data.formats.criteo:FORMAT",
        "sasrec_pairs": "nestrec.data.formats.user_lines:SASREC_PAIRS_FORMAT",
        "user_lines": "nestrec.data.formats.user_lines:USER_LINES_FORMAT",
        "synthetic": "nestrec.data.formats.synthetic_format:FORMAT",
    },
    of=FormatSpec,
)


_FILE_KINDS = ("csv", "json", "jsonl", "ndjson", "parquet", "tsv")
"""Names of kinds of files that users take for formats; `log` reads all of them."""


def find_format(name: str) -> FormatSpec:
    """Return a format; the error of a kind of file, such as csv, names the format that reads it."""
    if isinstance(name, str) and name not in FORMATS and name.lower() in _FILE_KINDS:
        remedy = "take log, which reads CSV, Parquet and JSON lines, as in `nestrec prepare log INPUT OUTPUT`"
        raise UserError("is a kind of file, not a format", option="format", value=name, remedy=remedy)
    return FORMATS.find(name, field="format")


def typed_options(name: str, overrides: Mapping[str, str]) -> Any:
    """The options of a format with dotted overrides, as typed on a command line."""
    _check_names(name, overrides)
    return with_overrides(FORMATS.by_default(name, "options"), overrides)


def given_options(name: str, given: Mapping[str, Any]) -> Any:
    """The options of a format from values by name, whole (`log=LogColumns(...)`) or dotted (`log.user`)."""
    return typed_options(name, override_texts(given))


def _check_names(name: str, given: Mapping[str, str]) -> None:
    """Options of other formats are refused: ignored in silence they would look obeyed."""
    known = _names_of(find_format(name))
    mistakes = ErrorCollector()
    for path, value in given.items():
        first = path.partition(".")[0]
        takers = [other for other in FORMATS if first in _names_of(FORMATS.find(other))] if first not in known else []
        if takers:
            remedy = f"leave it out; it belongs to {', '.join(takers)}"
            mistakes.add(f"is not an option of the format {name}", option=path, value=value, remedy=remedy)
    mistakes.raise_if_any()


def _names_of(format: FormatSpec) -> set[str]:
    return {field.name for field in dataclasses.fields(format.options)}


def prepare(
    format: str,
    input: Path | str | ArrowTable,
    output: Path | str,
    *,
    options: Any = None,
    progress: Progress = silent,
    **given: Any,
) -> DatasetCard:
    """Write the dataset of `input` to the folder `output`; its card.

    `input` is a path, for `synthetic` a preset's name, or for `log` an Arrow table or a DataFrame: anything that gives
    its columns as Arrow (`__arrow_c_stream__`).

    Options are given by name (`user_core=5`, `log={"user": "uid"}`, `**{"log.user": "uid"}` as on the command line), or
    all of them as the format's own config, `FORMATS[format].options`.
    The folder appears whole or not at all.
    """
    found = find_format(format)
    folder = given_path(output, "output")
    if options is not None and (given or not isinstance(options, found.options)):
        remedy = f"give a {found.options.__name__}, or options by name"
        raise UserError(
            "are not the options of this format", option="options", value=type(options).__name__, remedy=remedy
        )
    options = options or given_options(format, given)
    with given_input(input, "input") as source:
        card = found.prepare(str(source), folder, options, progress)
    if not isinstance(card, DatasetCard):
        raise FORMATS.broken(format, "prepare", f"gives {card!r} and no card of what it wrote")
    return card
