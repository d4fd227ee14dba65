"""How the commands' help looks."""

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


class _PlainFlags:
    """Parameters of a command, of which flags show no type: they take no value."""

    def get_params(self, context: Any) -> list[Any]:
        params: list[Any] = super().get_params(context)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.display_type_rich = lambda ctx: None
        return params


class PlainCommand(_PlainFlags, TyperCommand):
    """A command with plain flags."""


class PlainGroup(_PlainFlags, TyperGroup):
    """A group of commands with plain flags."""


def with_plain_flags(app: typer.Typer) -> None:
    """Make the help of all commands of an app show flags without `<bool>`."""
    app.info.cls = PlainGroup
    for command in app.registered_commands:
        command.cls = PlainCommand
    for group in app.registered_groups:
        if group.typer_instance is not None:
            group.cls = PlainGroup
            with_plain_flags(group.typer_instance)
