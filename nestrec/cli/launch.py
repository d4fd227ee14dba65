"""`nestrec launch -n 2 train ...`: torchrun on this machine, whose end tells what the ranks' end tells.

torchrun itself gives 1 for every failure of a rank, after a traceback of its own, and a stopped run looks like a
crash. Here a signal goes to the ranks alone, which save and end; the code is that of the first rank that ended, and a
line says what it means. Several machines and restarts are torchrun's business (docs/many-machines.md).
"""

import contextlib
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from types import FrameType

from nestrec.base import errors
from nestrec.cli.console import SAID_FOLDER

_MEANING = {
    errors.USER_ERROR: "a mistake that its message names",
    errors.NON_FINITE: "a loss that is not finite; the last checkpoint is intact",
    errors.INTERRUPTED: "saved and stopped; the same command goes on from there",
    errors.PEER_LOST: "another rank was lost; the same command goes on from the last checkpoint",
}


def is_script(word: str) -> bool:
    """Return whether the first word of a command names a script of the user, not a command of nestrec."""
    return word.endswith(".py")


def launch(num_ranks: int, arguments: Sequence[str]) -> int:
    """Run `nestrec ARGUMENTS`, or a script with its arguments, on several ranks of this machine; the exit code."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    # Behind the dashes nothing is taken for an option of torchrun's own: it would read --run as one of its --run-path.
    program = ["--", *arguments] if is_script(arguments[0]) else ["-m", "--", "nestrec", *arguments]
    torchrun = ["--standalone", "--nproc-per-node", str(num_ranks), *program]
    args = get_args_parser().parse_args(torchrun)
    args.signals_to_handle = "SIGHUP"  # the others are ours: torchrun would end the ranks and itself
    logging.disable(logging.CRITICAL)  # it logs every end of a rank as its own failure
    with tempfile.TemporaryDirectory(prefix="nestrec-launch-") as said, _signals_to_ranks():
        os.environ[SAID_FOLDER] = said
        try:
            run(args)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            return _ended(rank, failure.exitcode)
    return 0


def _ended(rank: int, code: int) -> int:
    """Say how the first rank ended, and what the launcher makes of it."""
    if code < 0:
        name, code = signal.Signals(-code).name, errors.PEER_LOST
        print(f"nestrec launch: rank {rank} was ended by {name}; code {code}: {_MEANING[code]}", file=sys.stderr)
        return code
    meaning = _MEANING.get(code, "an error of its own; see the traceback above")
    print(f"nestrec launch: rank {rank} ended with code {code}: {meaning}", file=sys.stderr)
    return code


@contextlib.contextmanager
def _signals_to_ranks() -> Iterator[None]:
    """SIGTERM and SIGINT ask every rank to save and end, and the launcher waits for it."""
    import psutil

    def pass_on(number: int, frame: FrameType | None) -> None:
        for rank in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
