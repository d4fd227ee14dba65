"""One step of a row-wise (sparse) optimizer on the rows of a batch, fused into one pass over the rows.

g: deduplicated gradient of a row, w: weight, c: moment scale, lr_t: learning rate, for Adam with its bias corrections.

    sgd              w -= lr_t * g
    adagrad          s += g^2;                   w -= lr_t * g / (sqrt(s) + eps)
    rowwise_adagrad  s += mean(g^2);             w -= lr_t * g / (sqrt(s / c) + eps)
    adam             m += (1-b1) * (g - m);      v += (1-b2) * (g^2 - v);        w -= lr_t * m / (sqrt(v) + eps)
    rowwise_adam     m as adam;                  v += (1-b2) * (mean(g^2) - v);  w -= lr_t * m / (sqrt(v) + eps)

Divisions by constants are multiplications by their inverses, as CUDA computes them. Means over a row are sums by
halves, in the same order in every implementation; square roots and divisions are correctly rounded, and there is no
fused multiply-add. So the kernel is bitwise identical to the reference implementation. 16-bit weights are updated in
float32 and rounded stochastically (`nestrec.ops.embedding.stochastic_rounding`), or to nearest if there are no draws.

Shapes: N rows, D elements of a row, P updated rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from nestrec.ops.embedding.row_sum import with_contiguous_rows
from nestrec.ops.embedding.stochastic_rounding import HALF_TYPES, round_stochastically
from nestrec.ops.kernel_op import HAS_TRITON, kernel_op, runs_triton

KINDS = ("sgd", "adagrad", "rowwise_adagrad", "adam", "rowwise_adam")
_TILE_ELEMENTS = 512
_NUM_WARPS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRule:
    """Row optimizer and its coefficients for one step."""

    kind: str
    """Optimizer, one of `KINDS`."""
    learning_rate: float
    """Learning rate of the step; includes the bias corrections of Adam."""
    eps: float = 0.0
    """Term added to the denominator for numerical stability; unused by SGD."""
    decay1: float = 0.0
    """Update rate of the first moment of Adam, 1 - b1."""
    decay2: float = 0.0
    """Update rate of the second moment of Adam, 1 - b2."""
    inverse_scale: float = 1.0
    """Inverse moment scale 1 / c of `rowwise_adagrad`."""

    @property
    def numbers(self) -> list[float]:
        """Coefficients as a flat list, as the operator needs them."""
        return [self.learning_rate, self.eps, self.decay1, self.decay2, self.inverse_scale]


def update_rows(
    weight_ND: torch.Tensor,
    states: Sequence[torch.Tensor],
    grad_PD: torch.Tensor,
    rule: RowRule,
    index_P: torch.Tensor | None = None,
    *,
    draw_P: torch.Tensor | None = None,
) -> None:
    """Update rows in place with their gradients.

    Args:
        weight_ND: Weights; may be strided.
        states: Optimizer state of the rule in the dtype of the gradient: (N, D), or (N, 1) for one value per row; may
            be strided.
        grad_PD: Gradients of the updated rows.
        rule: Optimizer and coefficients.
        index_P: Row of each gradient; negative ones are skipped, the others must be unique. None updates row i with
            gradient i.
        draw_P: Key of the random bits of each gradient, int64, for the stochastic rounding of 16-bit weights; other
            weights ignore it.
    """
    draws = draw_P if weight_ND.dtype in HALF_TYPES else None
    _run(weight_ND, list(states), grad_PD, index_P, draws, rule.kind, rule.numbers)


def update_rows_reference(
    weight_ND: torch.Tensor,
    states: Sequence[torch.Tensor],
    grad_PD: torch.Tensor,
    rule: RowRule,
    draw_P: torch.Tensor | None = None,
) -> None:
    """Reference implementation of `update_rows`; gradient i updates row i."""
    store_weight(weight_ND, weight_ND.to(grad_PD.dtype) - compute_change(states, grad_PD, rule), draw_P)


def store_weight(weight_ND: torch.Tensor, value_ND: torch.Tensor, draw_N: torch.Tensor | None) -> None:
    """Store updated values to weights of any dtype, rounded stochastically if they have 16 bits and there are draws."""
    is_drawn = weight_ND.dtype in HALF_TYPES and draw_N is not None
    weight_ND.copy_(round_stochastically(value_ND, draw_N, weight_ND.dtype) if is_drawn else value_ND)  # type: ignore[arg-type]


def compute_change(states: Sequence[torch.Tensor], grad_PD: torch.Tensor, rule: RowRule) -> torch.Tensor:
    """Return the values to subtract from the weights, and update the optimizer states in place."""
    return _RULES[rule.kind](states, grad_PD, rule)


def root(x: torch.Tensor) -> torch.Tensor:
    """Return the correctly rounded square root; torch's own on a CPU (MKL) can be wrong in the last bit."""
    return torch.from_numpy(np.sqrt(x.numpy())) if x.device.type == "cpu" else x.sqrt()


def mean_of_squares(grad: torch.Tensor) -> torch.Tensor:
    """Return the (n, 1) means of g^2 over each row, summed by halves: elements i and i + half first."""
    total = grad * grad
    while total.shape[1] > 1:
        half = (total.shape[1] + 1) // 2
        upper = total[:, half:]
        total = torch.cat([total[:, : upper.shape[1]] + upper, total[:, upper.shape[1] : half]], dim=1)
    return total * (1 / grad.shape[1])


def _sgd(states: Sequence[torch.Tensor], grad: torch.Tensor, rule: RowRule) -> torch.Tensor:
    return rule.learning_rate * grad


def _adagrad(states: Sequence[torch.Tensor], grad: torch.Tensor, rule: RowRule) -> torch.Tensor:
    states[0].add_(grad * grad)
    return rule.learning_rate * (grad / (root(states[0]) + rule.eps))


def _rowwise_adagrad(states: Sequence[torch.Tensor], grad: torch.Tensor, rule: RowRule) -> torch.Tensor:
    states[0].add_(mean_of_squares(grad))
    return rule.learning_rate * (grad / (root(states[0] * rule.inverse_scale) + rule.eps))


def _adam(states: Sequence[torch.Tensor], grad: torch.Tensor, rule: RowRule) -> torch.Tensor:
    return _adam_change(states, grad, grad * grad, rule)


def _rowwise_adam(states: Sequence[torch.Tensor], grad: torch.Tensor, rule: RowRule) -> torch.Tensor:
    return _adam_change(states, grad, mean_of_squares(grad), rule)


def _adam_change(
    states: Sequence[torch.Tensor], grad: torch.Tensor, square: torch.Tensor, rule: RowRule
) -> torch.Tensor:
    states[0].add_(rule.decay1 * (grad - states[0]))
    states[1].add_(rule.decay2 * (square - states[1]))
    return rule.learning_rate * (states[0] / (root(states[1]) + rule.eps))


_RULES: dict[str, Callable[[Sequence[torch.Tensor], torch.Tensor, RowRule], torch.Tensor]] = {
    "sgd": _sgd,
    "adagrad": _adagrad,
    "rowwise_adagrad": _rowwise_adagrad,
    "adam": _adam,
    "rowwise_adam": _rowwise_adam,
}


def can_launch(weight_ND: torch.Tensor, states: Sequence[torch.Tensor], sum_dtype: torch.dtype) -> bool:
    """Return whether the kernel can run: float32 gradients and states only.

    Triton has no correctly rounded float64 square root.
    """
    return runs_triton(weight_ND) and {sum_dtype, *(state.dtype for state in states)} == {torch.float32}


@kernel_op("update_rows", fake=lambda *_: None, mutates=("weight_ND", "states"))
def _run(  # noqa: PLR0917
    weight_ND: torch.Tensor,
    states: list[torch.Tensor],
    grad_PD: torch.Tensor,
    index_P: torch.Tensor | None,
    draw_P: torch.Tensor | None,
    kind: str,
    numbers: list[float],
) -> None:
    rule = rule_from_numbers(kind, numbers)
    if can_launch(weight_ND, states, grad_PD.dtype):
        _launch(weight_ND, states, with_contiguous_rows(grad_PD), index_P, draw_P, rule)
    elif index_P is None:
        update_rows_reference(weight_ND, states, grad_PD, rule, draw_P)
    else:
        _update_some(weight_ND, states, grad_PD, index_P, draw_P, rule)


def rule_from_numbers(kind: str, numbers: Sequence[float]) -> RowRule:
    """Build a rule from its kind and `RowRule.numbers`."""
    learning_rate, eps, decay1, decay2, inverse_scale = numbers
    return RowRule(
        kind=kind, learning_rate=learning_rate, eps=eps, decay1=decay1, decay2=decay2, inverse_scale=inverse_scale
    )


def _update_some(  # noqa: PLR0917
    weight_ND: torch.Tensor,
    states: list[torch.Tensor],
    grad_PD: torch.Tensor,
    index_P: torch.Tensor,
    draw_P: torch.Tensor | None,
    rule: RowRule,
) -> None:
    moved = index_P >= 0
    indices = index_P[moved].long()
    columns = [weight_ND, *states]
    updated = [c[indices] for c in columns]
    update_rows_reference(updated[0], updated[1:], grad_PD[moved], rule, None if draw_P is None else draw_P[moved])
    for column, values in zip(columns, updated, strict=True):
        column[indices] = values


def check_columns(weight_ND: torch.Tensor, states: Sequence[torch.Tensor], grad_PD: torch.Tensor, kind: str) -> None:
    """Assert that the arguments have the layout that the kernels need."""
    assert len(states) == {"sgd": 0, "adagrad": 1, "rowwise_adagrad": 1, "adam": 2, "rowwise_adam": 2}[kind]
    assert weight_ND.shape[1] == grad_PD.shape[1], "gradients and weights must have the same width"
    assert all(t.shape[1] == 1 or t.stride(1) == 1 for t in (weight_ND, grad_PD, *states)), "rows must be contiguous"


def kernel_columns(weight_ND: torch.Tensor, states: Sequence[torch.Tensor], rule: RowRule) -> dict[str, object]:
    """Return the arguments of `update_tile` that do not depend on the tile."""
    first, second = (*states, weight_ND, weight_ND)[:2]  # placeholders: a rule with fewer states never accesses them
    learning_rate, eps, decay1, decay2, inverse_scale = rule.numbers
    return {
        "weight": weight_ND,
        "first": first,
        "second": second,
        "learning_rate": learning_rate,
        "eps": eps,
        "decay1": decay1,
        "decay2": decay2,
        "inverse_scale": inverse_scale,
        "inverse_dim": 1 / weight_ND.shape[1],
        "KIND": KINDS.index(rule.kind),
        "D": weight_ND.shape[1],
        "BLOCK": triton.next_power_of_2(weight_ND.shape[1]),
        "WEIGHT_STRIDE": weight_ND.stride(0),
        "FIRST_STRIDE": first.stride(0),
        "SECOND_STRIDE": second.stride(0),
        "IS_BFLOAT16": weight_ND.dtype == torch.bfloat16,
    }


def _launch(  # noqa: PLR0917
    weight_ND: torch.Tensor,
    states: list[torch.Tensor],
    grad_PD: torch.Tensor,
    index_P: torch.Tensor | None,
    draw_P: torch.Tensor | None,
    rule: RowRule,
) -> None:
    check_columns(weight_ND, states, grad_PD, rule.kind)
    count, dim = grad_PD.shape
    if count == 0 or dim == 0:
        return
    tile_rows = max(1, _TILE_ELEMENTS // triton.next_power_of_2(dim))
    with torch.cuda.device_of(weight_ND):
        _update_kernel[(triton.cdiv(count, tile_rows),)](
            grad_PD,
            index_P,
            draw_P,
            count,
            **kernel_columns(weight_ND, states, rule),
            GRAD_STRIDE=grad_PD.stride(0),
            ROWS=tile_rows,
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,
        )


if HAS_TRITON:
    import triton
    import triton.language as tl

    from nestrec.ops.embedding.stochastic_rounding import round_tile

    @triton.jit
    def mean_by_halves(values, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, inverse_dim):  # type: ignore[no-untyped-def]
        """Return the (ROWS,) means of the first D of (ROWS, BLOCK) values, summed as in `mean_of_squares`."""
        total = values
        if D == BLOCK:
            for level in tl.static_range(16):
                if D >> level > 1:
                    total = tl.sum(tl.reshape(total, [ROWS, 2, D >> (level + 1)]), axis=1)
            mean = tl.reshape(total, [ROWS])
        else:
            column = tl.broadcast_to(tl.arange(0, BLOCK)[None, :], [ROWS, BLOCK])
            for level in tl.static_range(16):
                if (D - 1) >> level > 0:
                    upper = column + (((D - 1) >> (level + 1)) + 1)
                    added = total + tl.gather(total, tl.minimum(upper, BLOCK - 1), 1)
                    total = tl.where(upper < ((D - 1) >> level) + 1, added, total)
            mean = tl.sum(tl.where(column == 0, total, 0.0), axis=1)
        return mean * inverse_dim

    @triton.jit
    def update_tile(  # type: ignore[no-untyped-def]  # noqa: PLR0917
        gradient,
        value,
        row,
        moved,
        draws,
        position,
        weight,
        first,
        second,
        learning_rate,
        eps,
        decay1,
        decay2,
        inverse_scale,
        inverse_dim,
        KIND: tl.constexpr,
        D: tl.constexpr,
        BLOCK: tl.constexpr,
        ROWS: tl.constexpr,
        WEIGHT_STRIDE: tl.constexpr,
        FIRST_STRIDE: tl.constexpr,
        SECOND_STRIDE: tl.constexpr,
        IS_BFLOAT16: tl.constexpr,
    ):
        """Update (ROWS,) int64 rows where `moved` is set, with their (ROWS, BLOCK) float32 gradient and weight `value`.

        draws: int64 keys of random bits, indexed by (ROWS,) `position`; None rounds to nearest.
        """
        column = tl.arange(0, BLOCK)[None, :]
        mask = moved[:, None] & (column < D)
        at_first = first + row * FIRST_STRIDE
        at_second = second + row * SECOND_STRIDE
        if KIND == 0:
            change = gradient
        if KIND == 1:
            at = at_first[:, None] + column
            total = tl.load(at, mask=mask, other=1.0) + gradient * gradient
            tl.store(at, total, mask=mask)
            change = tl.div_rn(gradient, tl.sqrt_rn(total) + eps)
        if KIND == 2:
            total = tl.load(at_first, mask=moved, other=1.0)
            total += mean_by_halves(gradient * gradient, D, BLOCK, ROWS, inverse_dim)
            tl.store(at_first, total, mask=moved)
            divisor = tl.sqrt_rn(total * inverse_scale) + eps
            change = tl.div_rn(gradient, tl.broadcast_to(divisor[:, None], [ROWS, BLOCK]))
        if KIND >= 3:
            at = at_first[:, None] + column
            moment = tl.load(at, mask=mask, other=0.0)
            moment += decay1 * (gradient - moment)
            tl.store(at, moment, mask=mask)
        if KIND == 3:
            at = at_second[:, None] + column
            square = tl.load(at, mask=mask, other=1.0)
            square += decay2 * (gradient * gradient - square)
            tl.store(at, square, mask=mask)
            change = tl.div_rn(moment, tl.sqrt_rn(square) + eps)
        if KIND == 4:
            square = tl.load(at_second, mask=moved, other=1.0)
            square += decay2 * (mean_by_halves(gradient * gradient, D, BLOCK, ROWS, inverse_dim) - square)
            tl.store(at_second, square, mask=moved)
            change = tl.div_rn(moment, tl.broadcast_to((tl.sqrt_rn(square) + eps)[:, None], [ROWS, BLOCK]))
        value = value.to(tl.float32) - learning_rate * change
        if draws is None:
            kept = value.to(weight.dtype.element_ty)
        else:
            draw = tl.load(draws + position, mask=moved, other=0)
            bits = round_tile(value, draw, BLOCK, IS_BFLOAT16)
            kept = bits.to(weight.dtype.element_ty, bitcast=True)
        tl.store(weight + (row * WEIGHT_STRIDE)[:, None] + column, kept, mask=mask)

    @triton.jit
    def load_weight(  # type: ignore[no-untyped-def]  # noqa: PLR0917
        weight, row, moved, D: tl.constexpr, BLOCK: tl.constexpr, WEIGHT_STRIDE: tl.constexpr
    ):
        """Load the (ROWS, BLOCK) weights of the rows where `moved` is set."""
        column = tl.arange(0, BLOCK)[None, :]
        return tl.load(weight + (row * WEIGHT_STRIDE)[:, None] + column, mask=moved[:, None] & (column < D), other=0.0)

    @triton.jit
    def _update_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917
        grad,
        index,
        draws,
        count,
        weight,
        first,
        second,
        learning_rate,
        eps,
        decay1,
        decay2,
        inverse_scale,
        inverse_dim,
        KIND: tl.constexpr,
        D: tl.constexpr,
        BLOCK: tl.constexpr,
        ROWS: tl.constexpr,
        GRAD_STRIDE: tl.constexpr,
        WEIGHT_STRIDE: tl.constexpr,
        FIRST_STRIDE: tl.constexpr,
        SECOND_STRIDE: tl.constexpr,
        IS_BFLOAT16: tl.constexpr,
    ):
        position = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        inside = position < count
        if index is None:
            row = position.to(tl.int64)
        else:
            row = tl.load(index + position, mask=inside, other=-1).to(tl.int64)
        moved = inside & (row >= 0)
        value = load_weight(weight, row, moved, D, BLOCK, WEIGHT_STRIDE)
        gradient = load_weight(grad, position.to(tl.int64), moved, D, BLOCK, GRAD_STRIDE)
        update_tile(
            gradient,
            value,
            row,
            moved,
            draws,
            position,
            weight,
            first,
            second,
            learning_rate,
            eps,
            decay1,
            decay2,
            inverse_scale,
            inverse_dim,
            KIND,
            D,
            BLOCK,
            ROWS,
            WEIGHT_STRIDE,
            FIRST_STRIDE,
            SECOND_STRIDE,
            IS_BFLOAT16,
        )
