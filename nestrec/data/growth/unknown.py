"""Values of features of which nothing is known."""

from typing import Any

import numpy as np
import pyarrow as pa

from nestrec.data.card import Feature


def unknown_values(feature: Feature, kind: pa.DataType, number: int) -> pa.Array:
    """So many of them, of an Arrow type: 0 for a category, NaN for a number, an empty list or text."""
    if feature.is_list:
        offsets = pa.array(np.zeros(number + 1, np.int32))
        return pa.ListArray.from_arrays(offsets, pa.array([], kind.value_type), type=kind)
    value: Any = {"category": 0, "number": float("nan"), "text": ""}[feature.kind]
    return pa.array([value] * number, kind)
