"""The command line: commands, and what they print."""

from nestrec.cli.app import main

__all__ = ["main"]
