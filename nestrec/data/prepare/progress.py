"""How a long preparation tells what it is doing; who shows it is not decided here."""

from typing import Protocol


class Progress(Protocol):
    """Called now and then from the preparing thread."""

    def __call__(self, stage: str, done: float) -> None:
        """`stage` for people, `done` from 0 to 1 inside it."""


def silent(stage: str, done: float) -> None:
    """Shows nothing."""
