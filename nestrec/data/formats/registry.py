"""The formats by name, and the options that each takes."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from nestrec.base.config import with_overrides
from nestrec.base.errors import Mistakes, UserError
from nestrec.base.overriding import override_texts
from nestrec.base.seam import Seam
from nestrec.data.formats.format import Format

FORMATS: Seam[Format] = Seam(
    "nestrec.formats",
    "format",
    {
        "log": "nestrec.data.formats.log:FORMAT",
        "movielens": "nestrec.data.formats.movielens:FORMAT",
        "amazon_csv": "nestrec.data.formats.amazon:FORMAT",
        "kuairand": "nestrec.data.formats.kuairand:FORMAT",
        "criteo": "nestrec.data.formats.criteo:FORMAT",
        "sasrec_pairs": "nestrec.data.formats.sasrec_pairs:FORMAT",
        "user_lines": "nestrec.data.formats.user_lines:FORMAT",
        "synthetic": "nestrec.data.formats.synthetic:FORMAT",
    },
    of=Format,
)


def typed_options(name: str, overrides: Mapping[str, str]) -> Any:
    """The options of a format with dotted overrides, as typed on a command line."""
    _check_names(name, overrides)
    return with_overrides(FORMATS.by_default(name, "options"), overrides)


def given_options(name: str, given: Mapping[str, Any]) -> Any:
    """The options of a format from values by name, whole (`log=LogColumns(...)`) or dotted (`log.user`)."""
    return typed_options(name, override_texts(given))


def _check_names(name: str, given: Mapping[str, str]) -> None:
    """Options of other formats are refused: ignored in silence they would look obeyed."""
    known = _names_of(FORMATS.find(name))
    mistakes = Mistakes()
    for path, value in given.items():
        first = path.partition(".")[0]
        takers = [other for other in FORMATS if first in _names_of(FORMATS.find(other))] if first not in known else []
        with mistakes.noted():
            if takers:
                remedy = f"leave it out; it belongs to {', '.join(takers)}"
                raise UserError(f"is not an option of the format {name}", field=path, value=value, remedy=remedy)
    mistakes.raise_all()


def _names_of(format: Format) -> set[str]:
    return {field.name for field in dataclasses.fields(format.options)}
