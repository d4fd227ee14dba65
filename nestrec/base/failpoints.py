"""Named points at which a test can make the program fail.

A point does nothing unless a handler is installed, which only tests do: no option and no environment variable of the
package can arm one.
"""

from collections.abc import Callable

_handlers: list[Callable[[str], None]] = []


def fail_point(name: str) -> None:
    """Calls the installed handler with the name of the point; does nothing if there is none."""
    for handler in _handlers:
        handler(name)


def install(handler: Callable[[str], None]) -> None:
    """Installs the handler of all fail points of this process."""
    _handlers[:] = [handler]
