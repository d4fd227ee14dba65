"""Clock and power of a GPU during a measurement, as reported by nvidia-smi.

A device under steady load lowers its clock to stay within its power limit, which slows down all its units.
"""

import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import IO, Self

FIELDS = {"sm_mhz": "clocks.sm", "power_w": "power.draw.instant", "power_limit_w": "power.limit"}
QUERY = ("nvidia-smi", f"--query-gpu={','.join(FIELDS.values())}", "--format=csv,noheader,nounits", "--loop-ms=20")


class ClockLog:
    """Context manager that samples the first GPU; without nvidia-smi, it does not collect samples."""

    def __init__(self, command: Sequence[str] = QUERY) -> None:
        self._command = command
        self._samples = list[tuple[float, list[float]]]()
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        if shutil.which(self._command[0]) is not None:
            self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
            assert self._process.stdout is not None
            self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
            self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.terminate()
            self._reader.join()
            self._process.wait()

    def _read(self, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                try:
                    values = [float(word) for word in line.split(",")]
                except ValueError:  # a message instead of a sample
                    continue
                self._samples.append((time.perf_counter(), values))

    def medians(self, begin: float, end: float) -> dict[str, float]:
        """Return the medians of the samples between two values of `time.perf_counter`; empty without samples."""
        found = [values for at, values in self._samples if begin <= at <= end]
        return dict(zip(FIELDS, map(statistics.median, zip(*found, strict=True)), strict=False))
