"""Rows of host memory that are asked for before they are needed, inside numba loops.

Rows lie at random places, and a processor sees one or two of them ahead: most of the time of a copy is waiting for
memory, all the more while other threads use it.
"""

from typing import Any

from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

AHEAD = 6
"""Rows."""
_LINE_WORDS = 16


def _prefetch(typing_context, array, row, word):  # type: ignore[no-untyped-def]
    """Ask for the cache line of array[row, word]."""
    signature = types.void(array, types.intp, types.intp)

    def code(context, builder, signature, values):  # type: ignore[no-untyped-def]
        kind = signature.args[0]
        memory = make_array(kind)(context, builder, values[0])
        place = cgutils.get_item_pointer(context, builder, kind, memory, list(values[1:]), wraparound=False)
        ir, number = cgutils.ir, cgutils.int32_t
        pointer = builder.bitcast(place, cgutils.voidptr_t)
        function_type = ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", (pointer.type,), function_type)
        builder.call(function, [pointer, number(0), number(3), number(1)])  # to be read, to be kept, data

    return signature, code


_prefetch_word: Any = intrinsic(_prefetch)


@njit(cache=True, nogil=True, inline="always")
def prefetch_row(rows, row, width):  # type: ignore[no-untyped-def]
    """Ask for rows[row, :width]; nothing happens where the row is negative."""
    if row >= 0:
        for word in range(0, width, _LINE_WORDS):
            _prefetch_word(rows, row, word)
