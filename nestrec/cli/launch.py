"""`nestrec launch -n 2 train ...`: runs torchrun on this machine and returns the exit code of the ranks.

torchrun itself exits with 1 for every failure of a rank, after its own traceback, and an interrupted run looks like a
crash. `launch` forwards signals to the ranks, which save a checkpoint and exit; it returns the exit code of the first
rank that failed and prints what the code means. For several machines and restarts, use torchrun
(docs/many-machines.md).
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
from nestrec.cli.console import PRINTED_ONCE_FOLDER

_MEANING = {
    errors.USER_ERROR: "invalid input; see the error message above",
    errors.NON_FINITE: "the loss is not finite; the last checkpoint is intact",
    errors.INTERRUPTED: "interrupted after a checkpoint was saved; the same command resumes the run",
    errors.PEER_LOST: "a rank was lost; the same command resumes from the last checkpoint",
}


def is_script(word: str) -> bool:
    """Return whether the first word of a command names a script of the user, not a command of nestrec."""
    return word.endswith(".py")


def launch(num_ranks: int, arguments: Sequence[str]) -> int:
    """Run `nestrec ARGUMENTS`, or a script with its arguments, on several ranks of this machine.

    Returns:
        The exit code of the first rank that failed, or 0.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    # After "--" torchrun does not parse options: it would read --run as an abbreviation of its own --run-path.
    program = ["--", *arguments] if is_script(arguments[0]) else ["-m", "--", "nestrec", *arguments]
    torchrun = ["--standalone", "--nproc-per-node", str(num_ranks), *program]
    args = get_args_parser().parse_args(torchrun)
    args.signals_to_handle = "SIGHUP"  # SIGTERM and SIGINT are handled here: torchrun would kill the ranks and exit
    logging.disable(logging.CRITICAL)  # torchrun logs every exit of a rank as a failure
    with tempfile.TemporaryDirectory(prefix="nestrec-launch-") as folder, _forward_signals():
        os.environ[PRINTED_ONCE_FOLDER] = folder
        try:
            run(args)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            return _report_failure(rank, failure.exitcode)
    return 0


def _report_failure(rank: int, code: int) -> int:
    """Print why the first rank failed, and return the exit code of the launcher."""
    if code < 0:
        name, code = signal.Signals(-code).name, errors.PEER_LOST
        print(f"nestrec launch: rank {rank} was killed by {name}; code {code}: {_MEANING[code]}", file=sys.stderr)
        return code
    meaning = _MEANING.get(code, "unexpected error; see the traceback above")
    print(f"nestrec launch: rank {rank} exited with code {code}: {meaning}", file=sys.stderr)
    return code


@contextlib.contextmanager
def _forward_signals() -> Iterator[None]:
    """Forward SIGTERM and SIGINT to every rank as SIGTERM, so that the ranks save a checkpoint and exit."""
    import psutil

    def forward(number: int, frame: FrameType | None) -> None:
        for rank in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
