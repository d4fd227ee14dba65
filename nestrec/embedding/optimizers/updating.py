"""One step of a row optimiser on the rows of a batch: by its host loop, its kernel, or else its formula.

All optimisers are lazy: a row moves only in steps that use it.
"""

import torch

from nestrec.base.parallel import for_parts
from nestrec.embedding.layout import RowLayout
from nestrec.embedding.row_optimizer import RowOptimizer, RowStep


def runs_host_loop(rows: torch.Tensor, layout: RowLayout, optimizer: RowOptimizer) -> bool:
    """Host loops are for weights of the state's own type; 16-bit weights take the other path."""
    is_whole = layout.weight.dtype in (torch.float32, torch.float64)
    return optimizer.host_loop is not None and rows.device.type == "cpu" and is_whole


def update_rows_on_host(
    rows: torch.Tensor, grad: torch.Tensor, layout: RowLayout, step: RowStep, *, num_threads: int
) -> None:
    """As `update_rows` without places, by the host loop; equal to the bit."""
    loop = step.options.spec.host_loop
    assert loop is not None
    dtype = layout.weight.dtype
    values, gradients = rows.view(dtype).numpy(), grad.contiguous().numpy()
    columns = [column.offset_bytes // dtype.itemsize for column in layout.columns[1:]]
    for_parts(len(rows), len(rows), lambda a, b: loop(values[a:b], gradients[a:b], columns, step), num_threads)


def update_rows(
    rows: torch.Tensor, grad: torch.Tensor, layout: RowLayout, step: RowStep, places: torch.Tensor | None = None
) -> None:
    """One step on (n, num_words) rows, in place; `grad` is (n, dim) in the state's type.

    places: the row of each gradient, negative for gradients to be dropped; none: row i for gradient i.
    """
    weight, *states = (layout.view(rows, column.name) for column in layout.columns)
    optimizer = step.options.spec
    if optimizer.kernel is not None:
        optimizer.kernel(weight, states, grad, places, step)
    else:
        update_by_formula(optimizer, weight, states, grad, step, places)


def update_by_formula(  # noqa: PLR0917
    optimizer: RowOptimizer, weight: torch.Tensor, states: list[torch.Tensor], grad: torch.Tensor, step: RowStep,
    places: torch.Tensor | None,
) -> None:  # fmt: skip
    """The definition, on rows of any type and device."""
    columns = [weight, *states]
    if places is None:
        picked = columns
    else:
        moved = places >= 0
        chosen, grad = places[moved].long(), grad[moved]
        picked = [column[chosen] for column in columns]
    change = optimizer.formula(picked[1:], grad, step)
    picked[0].copy_(picked[0].to(grad.dtype) - change)
    if places is not None:
        for column, values in zip(columns, picked, strict=True):
            column[chosen] = values
