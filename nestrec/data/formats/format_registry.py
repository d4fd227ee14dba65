"""Provides the plugin registry of input formats, their options, and `prepare`, which converts input to a dataset."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nestrec.base.config_overrides import apply_overrides, override_texts
from nestrec.base.errors import ErrorCollector, UserError
from nestrec.base.files import parse_path
from nestrec.base.plugins import PluginRegistry
from nestrec.data.dataset_card import DatasetCard
from nestrec.data.formats.format_spec import FormatSpec
from nestrec.data.prepare.log_source import ArrowTable, input_as_path
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
"""File types that users often name instead of a format; the format `log` reads all of them."""


_SYNONYMS = {
    "recbole": "movielens",
    "inter": "movielens",
    "ml-100k": "movielens",
    "ml-1m": "movielens",
    "amazon": "amazon_csv",
    "sasrec": "sasrec_pairs",
    "dataframe": "log",
    "custom": "log",
}
"""Names by which users look for a format, and the format that reads such files."""


def find_format(name: str) -> FormatSpec:
    """Return a format by name; for other names, such as csv or recbole, the error suggests the format to use."""
    if isinstance(name, str) and name not in FORMATS and name.lower() in _FILE_KINDS:
        remedy = "use the format log, which reads CSV, Parquet and JSON lines: nestrec prepare log INPUT OUTPUT"
        raise UserError("this is a file type, not a format", option="format", value=name, remedy=remedy)
    if isinstance(name, str) and name not in FORMATS and name.lower() in _SYNONYMS:
        remedy = f"did you mean {_SYNONYMS[name.lower()]!r}?"
        if name.lower() in {"recbole", "inter"}:
            remedy += " It also reads RecBole's atomic files (.inter, .user, .item) of any dataset."
        raise UserError("no such format", option="format", value=name, remedy=remedy)
    return FORMATS.find(name, field="format")


def options_from_text(name: str, overrides: Mapping[str, str]) -> Any:
    """Return the options of a format with overrides as text, as typed on the command line.

    Args:
        name: Name of the format.
        overrides: Text of each option by its dotted name.
    """
    _check_names(name, overrides)
    return apply_overrides(FORMATS.default_config(name, "options"), overrides)


def options_from_values(name: str, overrides: Mapping[str, Any]) -> Any:
    """Return the options of a format from Python values.

    Args:
        name: Name of the format.
        overrides: Values by option name, for sections (`log=LogColumns(...)`) or dotted (`log.user`).
    """
    return options_from_text(name, override_texts(overrides))


def _check_names(name: str, overrides: Mapping[str, str]) -> None:
    """Raise for options of other formats, which would otherwise be ignored silently."""
    known = _option_names(find_format(name))
    errors = ErrorCollector()
    for path, value in overrides.items():
        first = path.partition(".")[0]
        formats_with_option = (
            [other for other in FORMATS if first in _option_names(FORMATS.find(other))] if first not in known else []
        )
        if formats_with_option:
            remedy = f"remove this option; only these formats have it: {', '.join(formats_with_option)}"
            errors.add(f"the format {name} does not have this option", option=path, value=value, remedy=remedy)
    errors.raise_if_any()


def _option_names(format: FormatSpec) -> set[str]:
    return {field.name for field in dataclasses.fields(format.options)}


def prepare(
    format: str,
    input: Path | str | ArrowTable,
    output: Path | str,
    *,
    options: Any = None,
    progress: Progress = silent,
    **overrides: Any,
) -> DatasetCard:
    """Prepare a dataset from an input, and return its card.

    The output folder is written atomically: after a failure it does not exist, or is unchanged.

    Args:
        format: Name of the input format, such as `log` or `movielens`.
        input: A path; for `synthetic` the name of a preset; for `log` also a pyarrow table, a DataFrame or another
            object with the Arrow C stream interface (`__arrow_c_stream__`).
        output: Folder of the dataset.
        options: All options as an instance of the format's config class, `FORMATS[format].options`.
        progress: Callback for progress.
        overrides: Options by name (`min_events_per_user=5`, `log={"user": "uid"}`), or with dotted names as on the
            command line (`**{"log.user": "uid"}`).

    Returns:
        The card of the dataset: its counts, features and options.

    Raises:
        UserError: An option is invalid.
        DataError: The input is invalid.

    Example:
        >>> card = nestrec.prepare("log", "events.csv", "data/mine", log={"user": "uid", "item": "iid", "time": "ts"})
        >>> card.counts.users
        7
    """
    spec = find_format(format)
    folder = parse_path(output, "output")
    if options is not None and (overrides or not isinstance(options, spec.options)):
        remedy = f"pass either an instance of {spec.options.__name__} or options by name"
        raise UserError(
            f"invalid options for the format {format}",
            option="options",
            value=type(options).__name__,
            remedy=remedy,
        )
    options = options or options_from_values(format, overrides)
    with input_as_path(input, "input") as source:
        card = spec.prepare(str(source), folder, options, progress)
    if not isinstance(card, DatasetCard):
        raise FORMATS.contract_error(format, "prepare", f"returned {card!r} instead of a DatasetCard")
    return card
