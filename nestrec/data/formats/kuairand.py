"""Reads KuaiRand (Pure, 1K, 27K) from its native files: all twelve feedback signals, user and video features.

Events are ordered by `time_ms`, because `date` and `hourmin` are rounded and ahead of it. Exact duplicate rows (2 to
3%) are dropped by default. Users of either period are included. Vocabulary sizes come from the files; id 0 means
unknown.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from nestrec.base.config import config
from nestrec.base.errors import DataError, require
from nestrec.data.dataset_schema import KUAIRAND_BITS
from nestrec.data.formats.format_spec import log_format
from nestrec.data.prepare.event_parser import EventColumns
from nestrec.data.prepare.log_source import LogSource, delimited_files, name_without_gz, require_input, side_files
from nestrec.data.prepare.prepare_options import LogColumns, NumberTransform, PrepareOptions
from nestrec.data.prepare.raw_rows import DelimitedFormat, first_line, header_names
from nestrec.data.prepare.side_tables import SideColumn, SideKind, SideSource

ACTIONS = {
    "click": "is_click",
    "like": "is_like",
    "follow": "is_follow",
    "comment": "is_comment",
    "forward": "is_forward",
    "hate": "is_hate",
    "long_view": "long_view",
    "profile_enter": "is_profile_enter",
    "random": "is_rand",
}
LOG = LogColumns(
    user="user_id",
    item="video_id",
    time="time_ms",
    time_unit="ms",
    actions=ACTIONS,
    categories=("tab",),
    outcome_features={name: name for name in ("play_time_ms", "profile_stay_time", "comment_stay_time")},
    numbers=("duration_ms",),
    transforms={"duration_ms": "log"},
)
USER_NUMBERS = ("follow_user_num", "fans_user_num", "friend_user_num", "register_days")
VIDEO_KINDS: dict[str, SideKind] = {
    "author_id": "category",
    "video_type": "category",
    "upload_dt": "date",
    "upload_type": "category",
    "visible_status": "category",
    "video_duration": "number",
    "server_width": "number",
    "server_height": "number",
    "music_id": "category",
    "music_type": "category",
    "tag": "categories",
}

_TRANSFORMS: dict[SideKind, NumberTransform] = {"number": "log", "date": "standard"}


@config
class KuaiRandOptions(PrepareOptions):
    """Options for KuaiRand: the files of an edition that are read."""

    random_logs: bool = False
    """Whether the logs of random exposure are read as well."""
    video_statistics: bool = False
    """Whether the video statistics are read as well; they are averages over the complete month and therefore leak
    information from the future."""


def open_kuairand(path: Path, options: KuaiRandOptions) -> LogSource:
    """Open the folder of an edition, or its `data` folder; file parts and gzip files are found by name."""
    folder = require_input(path) / "data" if (path / "data").is_dir() else path
    logs = _files(folder, "log_standard") + (_files(folder, "log_random") if options.random_logs else [])
    remedy = "name a folder with files such as log_standard_4_08_to_4_21_pure.csv"
    require(logs, "no KuaiRand logs found", option="input", value=str(path), remedy=remedy, error=DataError)
    items = _side(_files(folder, "video_features_basic"), "video_id", VIDEO_KINDS)
    if options.video_statistics:
        items += _side(_files(folder, "video_features_statistic"), "video_id", {})
    return LogSource(
        path.name,
        "kuairand",
        EventColumns(LOG, dict(KUAIRAND_BITS)),
        delimited_files(logs, DelimitedFormat()),
        drops_duplicates=True,
        users=_side(_files(folder, "user_features"), "user_id", _user_kinds(folder)) + _earlier_history(folder),
        items=items,
        files=tuple(logs),
    )


def _files(folder: Path, kind: str) -> list[Path]:
    """Return the files of one kind in order of name, so that periods and parts are in sequence."""
    pattern = re.compile(rf"{kind}(_\w+)?_(pure|1k|27k)(_part\d+)?\.csv(\.gz)?")
    return sorted((p for p in folder.iterdir() if pattern.fullmatch(p.name)), key=lambda p: p.name)


def _user_kinds(folder: Path) -> dict[str, SideKind]:
    files = _files(folder, "user_features")
    names = _columns(files) if files else ()
    return {name: "number" if name in USER_NUMBERS else "category" for name in names if name != "user_id"}


def _side(files: Sequence[Path], key: str, kinds: dict[str, SideKind]) -> tuple[SideSource, ...]:
    """Return the side table of the files; columns that are not in `kinds` are numbers."""
    if not files:
        return ()
    prefix = f"{key.removesuffix('_id')}_"  # `user_active_degree` becomes the feature `active_degree` of the user
    names = [name for name in _columns(files) if name != key]
    columns = tuple(
        SideColumn(
            n,
            kind,
            name=n.removeprefix(prefix) if prefix == "user_" else n,
            transform=_TRANSFORMS.get(kind, "none"),
        )
        for n, kind in ((n, kinds.get(n, "number")) for n in names)
    )
    return (SideSource(side_files(files, DelimitedFormat()), key, columns),)


def _earlier_history(folder: Path) -> tuple[SideSource, ...]:
    """Return the videos that users watched before the log starts, if the edition has them in a separate file."""
    files = sorted(p for p in folder.iterdir() if name_without_gz(p).startswith("user_history") and ".tsv" in p.name)
    text_format = DelimitedFormat(separator="\t", has_quotes=False)
    names = header_names(first_line(files[0]), text_format) if files else ()
    lists = tuple(SideColumn(n, "categories", f"earlier_{n}", separator=" ") for n in names if n.endswith("_seq"))
    numbers = tuple(SideColumn(n, "number", f"earlier_{n}", transform="log") for n in names if n == "history_len")
    return (SideSource(side_files(files, text_format), "user_id", lists + numbers),) if files else ()


def _columns(files: Sequence[Path]) -> tuple[str, ...]:
    return header_names(first_line(files[0]), DelimitedFormat())


FORMAT = log_format("KuaiRand (Pure, 1K, 27K): its folder of native files.", KuaiRandOptions, open_kuairand)
