"""Command line interface: the commands and their output."""

from nestrec.cli.app import main

__all__ = ["main"]
