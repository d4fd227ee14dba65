"""`prepare`: from the files of a format to a dataset."""

from collections.abc import Callable
from pathlib import Path

from nestrec.base.errors import UserError, did_you_mean
from nestrec.data.card import Card
from nestrec.data.formats.amazon import open_amazon
from nestrec.data.formats.criteo import write_criteo
from nestrec.data.formats.kuairand import open_kuairand
from nestrec.data.formats.log import open_log
from nestrec.data.formats.movielens import open_movielens
from nestrec.data.formats.sasrec_pairs import open_pairs
from nestrec.data.formats.user_lines import open_user_lines
from nestrec.data.prepare.folder import whole_folder
from nestrec.data.prepare.option_checks import check_options
from nestrec.data.prepare.options import PrepareOptions
from nestrec.data.prepare.progress import Progress, silent
from nestrec.data.prepare.sequences import assemble
from nestrec.data.prepare.source import LogSource
from nestrec.data.synthetic import logs as synthetic

LOG_FORMATS: dict[str, Callable[[Path, PrepareOptions], LogSource]] = {
    "amazon_csv": open_amazon,
    "kuairand": open_kuairand,
    "log": open_log,
    "movielens": open_movielens,
    "sasrec_pairs": open_pairs,
    "user_lines": open_user_lines,
}
"""Formats of event logs by name."""
FORMATS = (*LOG_FORMATS, "criteo", "synthetic")


def prepare(
    format: str,
    input: Path | str,
    output: Path | str,
    *,
    options: PrepareOptions | None = None,
    progress: Progress = silent,
) -> Card:
    """Write the dataset of `input` (for `synthetic`, a preset's name) to the folder `output`; its card.

    The folder appears whole or not at all.
    """
    options = options or PrepareOptions()
    if format not in FORMATS:
        raise UserError("is no input format", field="format", value=format, remedy=did_you_mean(format, FORMATS))
    check_options(format, options, tuple(LOG_FORMATS))
    if format == "synthetic":
        shape = synthetic.preset(
            str(input), num_users=options.num_users, num_items=options.num_items, seed=options.seed
        )
        return synthetic.generate(shape, Path(output), force=options.force, progress=progress)
    if format == "criteo":
        with whole_folder(Path(output), force=options.force) as folder:
            return write_criteo(folder, Path(input), options, progress)
    source = LOG_FORMATS[format](Path(input), options)
    with whole_folder(Path(output), force=options.force) as folder:
        return assemble(folder, source, options, progress)
