"""What somebody else is still making."""

from typing import Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)


class Coming(Protocol[T_co]):
    """A thing that another thread makes."""

    def wait(self) -> T_co:
        """It, once it is there, or the error of its making."""
