"""Numbers and times as people read them."""

import math
from typing import Any


def significant(value: float, digits: int = 4) -> str:
    """`value` with so many significant digits and no exponent where it is of a usual size."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)))
    if exponent < -5 or exponent >= 15:
        return f"{value:.{digits - 1}e}"
    decimals = max(0, digits - 1 - exponent)
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def compact(value: float) -> str:
    """Short, with a unit of thousands: 1.2k, 3.4M; very small values with an exponent: 5e-4."""
    if 0 < abs(value) < 1e-3:
        digits, exponent = f"{value:.1e}".split("e")
        return f"{float(digits):g}e{int(exponent)}"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return significant(value / size, 3) + unit
    return significant(value, 3)


def memory(mib: float) -> str:
    return f"{significant(mib / 1024, 3)} GiB" if mib >= 1024 else f"{mib:.0f} MiB"


def duration(seconds: float) -> str:
    """1h 02m, 3m 20s or 45s."""
    if not math.isfinite(seconds):
        return "-"
    whole = max(0, round(seconds))
    if whole >= 3600:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 60}m {whole % 60:02d}s" if whole >= 60 else f"{whole}s"


def as_number(value: Any) -> float:
    """A JSON value as a number; NaN where it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value)
