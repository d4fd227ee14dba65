"""Generates the reference pages of the site while it is built; `hooks` in mkdocs.yml names this file.

Each group of pages has a module: the Python API, the commands, the options, the HTTP API, the metrics, and the
compatibility tables.
"""

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.append(str(Path(__file__).parent))
from api_pages import api_pages
from command_pages import commands_page
from compatibility_page import compatibility_page
from metrics_page import metrics_page
from option_pages import option_pages
from request_examples import requests_page


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages, and remove the modules that generate them; mkdocs calls this hook."""
    for file in [file for file in files if file.src_uri.endswith(".py")]:
        files.remove(file)
    for path, text in generated_pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def generated_pages() -> dict[str, str]:
    """Return the text of each generated page by its path in the folder of the documentation."""
    reference = {
        **api_pages(),
        **option_pages(),
        "commands": commands_page(),
        "metrics": metrics_page(),
        "requests": requests_page(),
    }
    pages = {f"reference/{name}.md": text for name, text in reference.items()}
    return {**pages, "choose/compatibility.md": compatibility_page()}
