"""Are the rows still finite? Asked of every updated row on the device, answered whenever somebody reads the device.

Sums of updated rows times zero add up to zero, or to NaN for ever once a row held an infinity or a NaN. (Rows whose sum
overflows count as well: nothing can be learned from them either.)
"""

import threading

import torch

from nestrec.embedding.layout import RowLayout

_NUM_THREADS = 8


class RowWatch:
    """One number a table and thread, so that lanes which update rows at the same time do not wait for each other."""

    def __init__(self, num_tables: int, device: torch.device) -> None:
        # Made at once: what another stream allocates could be read here before it is filled.
        self._seen = torch.zeros(_NUM_THREADS, num_tables, dtype=torch.float64, device=device)
        self._row_of_thread: dict[int, int] = {}

    def look(self, table: int, layout: RowLayout, rows: torch.Tensor) -> None:
        """(n, num_words) rows of a table, by number, as an update has left them. The host does not wait."""
        mine = self._row_of_thread.setdefault(threading.get_ident(), len(self._row_of_thread) % _NUM_THREADS)
        for column in layout.columns:
            # Half precision is summed in float32, since its own range is soon passed; float32 in itself, which on a CPU
            # is six times as quick as in float64.
            kind = torch.float32 if column.dtype.itemsize < 4 else column.dtype
            self._seen[mine, table].add_(layout.view(rows, column.name).sum(dtype=kind) * 0)

    def seen(self) -> torch.Tensor:
        """(num_tables,) float64 on the device: 0, or NaN where rows are not finite. What lanes do now may lack."""
        return self._seen.sum(0)

    def forget(self, table: int) -> None:
        """The table is filled anew."""
        self._seen[:, table] = 0
