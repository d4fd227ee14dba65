"""A message that all ranks of one launch have is printed by one of them."""

import contextlib
import hashlib
import os
import sys

SAID_FOLDER = "NESTREC_SAID"
"""environment variable: a folder that the ranks of a launch share, with an empty file for each message"""


def say_once(text: str) -> None:
    """Print to standard error, unless another rank has said the same."""
    folder = os.environ.get(SAID_FOLDER)
    if folder is not None:
        file = os.path.join(folder, hashlib.sha256(text.encode()).hexdigest())
        try:
            os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return
        except OSError:
            pass  # better twice than not at all
    with contextlib.suppress(BrokenPipeError):
        print(text, file=sys.stderr)
