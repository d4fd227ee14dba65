"""Run a program that gets a signal when the process that started it is gone: nginx cannot watch a pipe.

Started as a script of its own, python tied.py PARENT SIGNAL PROGRAM ARGUMENTS..., which becomes the program. Linux
sends the signal when the thread that started it ends, so that must be one that stays.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, number, program = int(sys.argv[1]), signal.Signals[sys.argv[2]], sys.argv[3]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:  # it was gone before
        sys.exit(1)
    os.execv(program, sys.argv[3:])


if __name__ == "__main__":
    main()
