"""What threads may do to one element of an array at the same time, inside numba loops."""

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array


def _exchange_if(typing_context, array, index, expected, new):  # type: ignore[no-untyped-def]
    """array[index] = new where it is `expected`, in one step; whether it was.

    What the thread has read and written before is before it, and what comes after is after it, also for others.
    """
    signature = types.boolean(array, types.intp, array.dtype, array.dtype)

    def code(context, builder, signature, values):  # type: ignore[no-untyped-def]
        kind = signature.args[0]
        memory = make_array(kind)(context, builder, values[0])
        place = cgutils.get_item_pointer(context, builder, kind, memory, [values[1]], wraparound=False)
        return builder.extract_value(builder.cmpxchg(place, values[2], values[3], ordering="seq_cst"), 1)

    return signature, code


exchange_if: Any = intrinsic(_exchange_if)
