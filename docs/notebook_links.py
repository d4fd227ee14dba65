"""MkDocs hook that resolves the links of notebook pages, which mkdocs-jupyter renders as they are.

A link such as `../serving.md#export` in a Markdown cell of a notebook works in Jupyter and in the repository. On the
site, it is replaced by the address of the page. A link without a target is a warning, which fails a strict build.
"""

import logging
import posixpath
import re
from typing import Any

LOGGER = logging.getLogger("mkdocs.hooks.notebook_links")
LINK = re.compile(r'href="(?P<path>[^":#?]+\.(?:md|ipynb))(?P<anchor>#[^"]*)?"')


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Return the HTML of a page with resolved links; only pages made from notebooks are changed."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html
    folder = posixpath.dirname(page.file.src_uri)

    def resolve(match: re.Match[str]) -> str:
        target = files.get_file_from_path(posixpath.normpath(posixpath.join(folder, match["path"])))
        if target is None:
            LOGGER.warning(f"{page.file.src_uri} contains a link to {match['path']}, which is not a page")
            return match[0]
        return f'href="{target.url_relative_to(page.file)}{match["anchor"] or ""}"'

    return LINK.sub(resolve, html)
