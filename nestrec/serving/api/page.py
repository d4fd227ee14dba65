"""The live page: charts, the relay's last requests and a place to try requests, in one file that needs nothing else.

What runs and what styles is named by digest in its policy, so that nothing that a request brings could ever run there.
"""

import base64
import hashlib
from importlib import resources

from nestrec.serving.api.protocol.http import Header

_FILES = resources.files("nestrec.serving.api") / "pages"


def _read(name: str) -> str:
    return (_FILES / name).read_text(encoding="utf-8")


def _named(content: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() + "'"


_STYLE, _SCRIPT = _read("live.css"), _read("live.js")
PAGE = _read("live.html").replace("/*STYLE*/", _STYLE).replace("/*SCRIPT*/", _SCRIPT).encode()
PAGE_POLICY: Header = (
    b"content-security-policy",
    f"default-src 'none'; style-src {_named(_STYLE)}; script-src {_named(_SCRIPT)}; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'".encode(),
)
