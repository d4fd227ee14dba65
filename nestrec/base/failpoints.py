"""Fail points for fault injection: named lines of the code at which a test can inject a fault.

A fail point does nothing unless a handler is installed, and only tests install one: no option and no environment
variable of the package can activate it.
"""

from collections.abc import Callable

_handlers: list[Callable[[str], None]] = []


def fail_point(name: str) -> None:
    """Call the installed handler, if there is one, with the name of the fail point."""
    for handler in _handlers:
        handler(name)


def install(handler: Callable[[str], None]) -> None:
    """Install the handler of all fail points of this process."""
    _handlers[:] = [handler]
