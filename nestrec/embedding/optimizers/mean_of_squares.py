"""Mean of squares along a row for host loops, summed by halves as everywhere (nestrec.ops.rows.update)."""

from numba import njit


@njit(cache=True, nogil=True, error_model="numpy")
def mean_of_squares(grad, scratch):  # type: ignore[no-untyped-def]
    """scratch: as long as the gradient, of the type to sum in."""
    width = len(grad)
    for j in range(width):
        scratch[j] = grad[j] * grad[j]
    while width > 1:
        half = (width + 1) // 2
        for j in range(width - half):
            scratch[j] += scratch[half + j]
        width = half
    return scratch[0] * scratch.dtype.type(1 / len(grad))
