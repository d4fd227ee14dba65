"""Which device is meant where a config says `auto`."""

from typing import Literal

DeviceChoice = Literal["auto", "cpu", "cuda"]
"""What a config may ask for."""


def chosen_device(wanted: str) -> str:
    """`auto` is a GPU where there is one, else the CPU; anything else is itself."""
    import torch  # configs name `DeviceChoice`, and whoever reads one need not load torch

    if wanted != "auto":
        return wanted
    return "cuda" if torch.cuda.is_available() else "cpu"
