"""Options of `prepare` that a format would not read are refused: ignored in silence they would look obeyed."""

from collections.abc import Sequence

from nestrec.base.config import leaves
from nestrec.base.errors import UserError
from nestrec.data.prepare.options import PrepareOptions

_RATED = ("amazon_csv", "movielens", "log")
_ONLY_FOR: dict[str, tuple[str, ...]] = {
    "log": ("log",),
    "min_rating": _RATED,
    "positive_rating": _RATED,
    "item_attributes": ("user_lines",),
    "review_columns": ("amazon_csv",),
    "random_logs": ("kuairand",),
    "video_statistics": ("kuairand",),
    "num_users": ("synthetic",),
    "num_items": ("synthetic",),
    "seed": ("synthetic",),
}
_OF_ROWS_TOO = ("max_bad_share", "duplicates")
"""Read by every format whose input is files."""


def check_options(format: str, options: PrepareOptions, log_formats: Sequence[str]) -> None:
    """Raise a UserError for the first option that was given and that `format` does not read."""
    defaults = leaves(PrepareOptions())
    for name, value in leaves(options).items():
        takers = _takers(name.partition(".")[0], format, log_formats)
        if value != defaults.get(name) and format not in takers:
            raise UserError(
                f"is not an option of the format {format}", field=name, value=value,
                remedy=f"leave it out; it belongs to {', '.join(takers)}",
            )  # fmt: skip
    for name in ("min_rating", "positive_rating"):
        if format == "log" and getattr(options, name) is not None and options.log.rating is None:
            raise UserError(
                "needs a column of ratings", field=name, value=getattr(options, name),
                remedy="name it with --log.rating COLUMN",
            )  # fmt: skip


def _takers(name: str, format: str, log_formats: Sequence[str]) -> Sequence[str]:
    if name == "force":
        return (format,)
    if name in _OF_ROWS_TOO:
        return (*log_formats, "criteo")
    return _ONLY_FOR.get(name, log_formats)
