"""Which device is meant where a config says `auto`."""

from typing import TYPE_CHECKING, Literal

from nestrec.base.errors import UserError

if TYPE_CHECKING:
    import torch

DeviceChoice = Literal["auto", "cpu", "cuda"]
"""What a config may ask for."""


def chosen_device(wanted: str) -> str:
    """`auto` is a GPU where there is one, else the CPU; anything else is itself."""
    import torch  # configs name `DeviceChoice`, and whoever reads one need not load torch

    if wanted != "auto":
        return wanted
    return "cuda" if torch.cuda.is_available() else "cpu"


def known_device(wanted: str) -> "torch.device":
    """The same as torch has it; a `UserError` where that is none."""
    import torch

    try:
        return torch.device(chosen_device(wanted))
    except (RuntimeError, TypeError):
        remedy = 'take "cpu", "cuda" or "auto"'
        raise UserError("is no device", field="device", value=wanted, remedy=remedy) from None
