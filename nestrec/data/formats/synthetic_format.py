"""Synthetic logs: the input is the name of a preset."""

from pathlib import Path

from nestrec.base.config import config
from nestrec.base.config_values import Count
from nestrec.data.dataset_card import DatasetCard
from nestrec.data.formats.format_spec import FormatSpec
from nestrec.data.prepare.prepare_options import Progress
from nestrec.data.synthetic.synthetic_logs import generate, preset


@config
class SyntheticOptions:
    """How much to draw."""

    num_users: Count | None = None
    """Users to draw; the preset's number by default."""
    num_items: Count | None = None
    """Items to draw from; scaled with the users by default."""
    seed: int = 0
    """Of all that is drawn."""
    force: bool = False
    """Replace the dataset that is in the folder already; without it that is an error."""


def _prepare(input: str, output: Path, options: SyntheticOptions, progress: Progress) -> DatasetCard:
    shape = preset(input, num_users=options.num_users, num_items=options.num_items, seed=options.seed)
    return generate(shape, output, force=options.force, progress=progress)


FORMAT = FormatSpec("Logs drawn at random from a preset, for tests and demonstrations.", SyntheticOptions, _prepare)
