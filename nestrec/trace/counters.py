"""What training has moved between ranks and stores so far; evaluation is not counted."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Leg:
    """One direction of one exchange."""

    rows: int = 0
    """Rows or keys, those that stay on the rank included."""
    bytes_sent: int = 0
    """Bytes that left this rank for another."""

    def add(self, rows: int, bytes_sent: int) -> None:
        self.rows += rows
        self.bytes_sent += bytes_sent


@dataclass(slots=True)
class EngineStatistics:
    """Counters of one rank."""

    keys: Leg = field(default_factory=Leg)
    """Distinct keys of the sources, on their way to the owners."""
    vectors: Leg = field(default_factory=Leg)
    """Vectors, on their way from the owners."""
    vector_bytes: int = 0
    """Bytes of the vectors looked up, those that stay on the rank included."""
    gradients: Leg = field(default_factory=Leg)
    """Gradients, on their way to the owners."""
    within_host: Leg = field(default_factory=Leg)
    """Where exchanges go by hosts: vectors and gradients inside a host. Keys, vectors and gradients are then those
    between hosts."""
    replicas: Leg = field(default_factory=Leg)
    """Gradients or rows, on their way to the other holders of a shard."""
    rows_fetched: int = 0
    """Distinct rows that the owner took from its stores."""
    rows_written: int = 0
    """Rows that went back to the stores."""
    window_bytes: int = 0
    """Most bytes that a batch's vectors and gradients took in the window cache."""
    rows_read: int = 0
    """Rows that were read without waiting for the updates before them (semi_async)."""
    rows_late: int = 0
    """Those of them that an awaited update was about to change."""
    most_late: int = 0
    """Most updates that a row has missed."""
