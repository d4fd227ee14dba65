"""Generates synthetic event logs; the input is the name of a preset."""

from pathlib import Path

from nestrec.base.config import config
from nestrec.base.config_values import Count
from nestrec.data.dataset_card import DatasetCard
from nestrec.data.formats.format_spec import FormatSpec
from nestrec.data.prepare.prepare_options import Progress
from nestrec.data.synthetic.synthetic_logs import generate, preset


@config
class SyntheticOptions:
    """Options for synthetic logs."""

    num_users: Count | None = None
    """Number of users; by default that of the preset."""
    num_items: Count | None = None
    """Number of items; by default that of the preset, scaled with the number of users."""
    seed: int = 0
    """Seed of the random number generator."""
    force: bool = False
    """Whether an existing dataset in the output folder is replaced; otherwise it is an error."""


def _prepare(input: str, output: Path, options: SyntheticOptions, progress: Progress) -> DatasetCard:
    shape = preset(input, num_users=options.num_users, num_items=options.num_items, seed=options.seed)
    return generate(shape, output, force=options.force, progress=progress)


FORMAT = FormatSpec(
    "Synthetic logs, generated randomly from a preset, for tests and demonstrations.", SyntheticOptions, _prepare
)
