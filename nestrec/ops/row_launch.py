"""Row kernels as operators of torch: checked launches, with a fake twin of each for torch.compile.

Rows are packed (T, width) matrices unless said otherwise; `key` is None without dropout, else int64 keys of the tokens,
and `site`, `threshold`, `scale` are those of `nestrec.ops.dropout.Dropout`.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch

from nestrec.base.errors import UserError

TILE = 4096
"""Elements of a program: two 16-byte loads a thread."""
KERNEL_TYPES = (torch.bfloat16, torch.float16, torch.float32)


def runs_kernels(x: torch.Tensor) -> bool:
    """Whether the rows of `x` are computed by kernels: on a GPU, or anywhere under Triton's interpreter."""
    place = x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    return place and x.dtype in KERNEL_TYPES


def compute_type(x: torch.Tensor) -> torch.dtype:
    """The type of products: autocast's where it is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


@torch.library.custom_op("nestrec::norm_rows", mutates_args=())
def norm_rows(
    x: torch.Tensor, out_type: torch.dtype, centred: bool, eps: float,
    key: torch.Tensor | None, site: int, threshold: int, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dropout(norm(x)), and the mean and reciprocal deviation of each row."""
    return _norm(x, None, None, out_type, centred, eps, key, site, threshold, scale)


@norm_rows.register_fake
def _(
    x: torch.Tensor, out_type: torch.dtype, centred: bool, eps: float,
    key: torch.Tensor | None, site: int, threshold: int, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return _empty(x, out_type), _column(x), _column(x)


@torch.library.custom_op("nestrec::add_norm_rows", mutates_args=())
def add_norm_rows(
    x: torch.Tensor, delta: torch.Tensor, out_type: torch.dtype, centred: bool, eps: float,
    key: torch.Tensor | None, site: int, threshold: int, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """x + delta, and what `norm_rows` gives for it."""
    total = torch.empty_like(x)
    return total, *_norm(x, delta, total, out_type, centred, eps, key, site, threshold, scale)


@add_norm_rows.register_fake
def _(
    x: torch.Tensor, delta: torch.Tensor, out_type: torch.dtype, centred: bool, eps: float,
    key: torch.Tensor | None, site: int, threshold: int, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return torch.empty_like(x), _empty(x, out_type), _column(x), _column(x)


def _norm(
    x: torch.Tensor, delta: torch.Tensor | None, total: torch.Tensor | None, out_type: torch.dtype, centred: bool,
    eps: float, key: torch.Tensor | None, site: int, threshold: int, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    from nestrec.ops.row_kernels import norm_forward_kernel

    check_rows(x, delta)
    out, mean, rstd = _empty(x, out_type), _column(x), _column(x)
    norm_forward_kernel[_grid(x)](
        x, x if delta is None else delta, x if total is None else total, out, mean, rstd, x if key is None else key,
        len(x), eps, site, threshold, scale, **_tile(x.shape[1]),
        CENTRED=centred, HAS_DELTA=delta is not None, HAS_DROPOUT=key is not None,
    )  # fmt: skip
    return out, mean, rstd


@torch.library.custom_op("nestrec::norm_rows_again", mutates_args=())
def norm_rows_again(
    x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, out_type: torch.dtype, centred: bool,
    key: torch.Tensor | None, site: int, threshold: int, scale: float,
) -> torch.Tensor:  # fmt: skip
    """The first output of `norm_rows`, from its statistics."""
    from nestrec.ops.row_kernels import norm_again_kernel

    out = _empty(x, out_type)
    norm_again_kernel[_grid(x)](
        x, out, mean, rstd, x if key is None else key, len(x), site, threshold, scale, **_tile(x.shape[1]),
        CENTRED=centred, HAS_DROPOUT=key is not None,
    )  # fmt: skip
    return out


@norm_rows_again.register_fake
def _(
    x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, out_type: torch.dtype, centred: bool,
    key: torch.Tensor | None, site: int, threshold: int, scale: float,
) -> torch.Tensor:  # fmt: skip
    return _empty(x, out_type)


@torch.library.custom_op("nestrec::norm_rows_backward", mutates_args=())
def norm_rows_backward(
    grad: torch.Tensor, grad_total: torch.Tensor | None, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor,
    centred: bool, key: torch.Tensor | None, site: int, threshold: int, scale: float,
) -> torch.Tensor:  # fmt: skip
    """Gradient of x from that of its norm, added to that of x itself where given."""
    from nestrec.ops.row_kernels import norm_backward_kernel

    check_rows(grad, grad_total, x)
    grad_x = torch.empty_like(x)
    norm_backward_kernel[_grid(x)](
        grad, grad if grad_total is None else grad_total, x, mean, rstd, grad_x, x if key is None else key,
        len(x), site, threshold, scale, **_tile(x.shape[1]),
        CENTRED=centred, HAS_TOTAL=grad_total is not None, HAS_DROPOUT=key is not None,
    )  # fmt: skip
    return grad_x


@norm_rows_backward.register_fake
def _(
    grad: torch.Tensor, grad_total: torch.Tensor | None, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor,
    centred: bool, key: torch.Tensor | None, site: int, threshold: int, scale: float,
) -> torch.Tensor:  # fmt: skip
    return torch.empty_like(x)


@torch.library.custom_op("nestrec::silu_columns", mutates_args=())
def silu_columns(z: torch.Tensor, first: int) -> torch.Tensor:
    """silu(z[:, first:]), packed."""
    from nestrec.ops.row_kernels import silu_forward_kernel

    check_rows(z)
    columns = z[:, first:]
    out = torch.empty(columns.shape, dtype=z.dtype, device=z.device)
    tile = _part_tile(columns.shape[1])
    silu_forward_kernel[_part_grid(columns)](columns, out, len(z), z.stride(0), **tile)
    return out


@silu_columns.register_fake
def _(z: torch.Tensor, first: int) -> torch.Tensor:
    return z.new_empty(z.shape[0], z.shape[1] - first)


@torch.library.custom_op("nestrec::silu_columns_backward", mutates_args=("grad_z",))
def silu_columns_backward(grad: torch.Tensor, z: torch.Tensor, grad_z: torch.Tensor, first: int) -> None:
    """grad_z[:, first : first + width of grad] from the gradient of those columns' SiLU, whose rows may be strided."""
    from nestrec.ops.row_kernels import silu_backward_kernel

    check_rows(z, grad_z)
    check_strided(grad)
    last = first + grad.shape[1]
    silu_backward_kernel[_part_grid(grad)](
        grad, z[:, first:last], grad_z[:, first:last], len(z), grad.stride(0), z.stride(0), grad_z.stride(0),
        **_part_tile(grad.shape[1]),
    )  # fmt: skip


@silu_columns_backward.register_fake
def _(grad: torch.Tensor, z: torch.Tensor, grad_z: torch.Tensor, first: int) -> None:
    return None


@torch.library.custom_op("nestrec::gate_rows", mutates_args=())
def gate_rows(
    parts: Sequence[torch.Tensor], gate: torch.Tensor, centred: bool, eps: float,
    key: torch.Tensor | None, site: int, threshold: int, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dropout(silu(gate) * norm(parts side by side)) and the norm's statistics; one part or three, rows strided."""
    from nestrec.ops.row_kernels import gate_forward_kernel

    check_parts(parts, gate)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    mean, rstd = _column(gate), _column(gate)
    a0, a1, a2 = _three(parts)
    tile = _tile(a0.shape[1], len(parts))
    gate_forward_kernel[_grid(a0, len(parts))](
        a0, a1, a2, gate, out, mean, rstd, gate if key is None else key, len(gate),
        a0.stride(0), a1.stride(0), a2.stride(0), gate.stride(0), eps, site, threshold, scale, **tile,
        PARTS=len(parts), CENTRED=centred, HAS_DROPOUT=key is not None,
    )  # fmt: skip
    return out, mean, rstd


@gate_rows.register_fake
def _(
    parts: Sequence[torch.Tensor], gate: torch.Tensor, centred: bool, eps: float,
    key: torch.Tensor | None, site: int, threshold: int, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return gate.new_empty(gate.shape), _column(gate), _column(gate)


@torch.library.custom_op("nestrec::gate_rows_backward", mutates_args=("grad_gate",))
def gate_rows_backward(
    grad: torch.Tensor, parts: Sequence[torch.Tensor], gate: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor,
    grad_gate: torch.Tensor, centred: bool, key: torch.Tensor | None, site: int, threshold: int, scale: float,
    again: bool,
) -> list[torch.Tensor]:  # fmt: skip
    """Gradients of the parts; `grad_gate` is filled. With `again` also the first output of `gate_rows`."""
    from nestrec.ops.row_kernels import gate_backward_kernel

    check_rows(grad)
    check_parts(parts, gate)
    check_strided(grad_gate)
    grads = [torch.empty(part.shape, dtype=part.dtype, device=part.device) for part in parts]
    out = torch.empty(grad.shape, dtype=gate.dtype, device=gate.device) if again else None
    (a0, a1, a2), (d0, d1, d2) = _three(parts), _three(grads)
    gate_backward_kernel[_grid(a0, len(parts))](
        grad, a0, a1, a2, gate, mean, rstd, d0, d1, d2, grad_gate, grad if out is None else out,
        gate if key is None else key, len(gate), a0.stride(0), a1.stride(0), a2.stride(0), gate.stride(0),
        grad_gate.stride(0), site, threshold, scale, **_tile(a0.shape[1], len(parts)),
        PARTS=len(parts), CENTRED=centred, HAS_DROPOUT=key is not None, AGAIN=again,
    )  # fmt: skip
    return grads if out is None else [*grads, out]


@gate_rows_backward.register_fake
def _(
    grad: torch.Tensor, parts: Sequence[torch.Tensor], gate: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor,
    grad_gate: torch.Tensor, centred: bool, key: torch.Tensor | None, site: int, threshold: int, scale: float,
    again: bool,
) -> list[torch.Tensor]:  # fmt: skip
    grads = [part.new_empty(part.shape) for part in parts]
    return [*grads, gate.new_empty(grad.shape)] if again else grads


@torch.library.custom_op("nestrec::swiglu", mutates_args=())
def swiglu(z: torch.Tensor) -> torch.Tensor:
    """silu(a) * b of z = [a, b]."""
    from nestrec.ops.row_kernels import swiglu_forward_kernel

    check_rows(z)
    out = z.new_empty(len(z), z.shape[1] // 2)
    swiglu_forward_kernel[_part_grid(out)](z, out, len(z), **_part_tile(out.shape[1]))
    return out


@swiglu.register_fake
def _(z: torch.Tensor) -> torch.Tensor:
    return z.new_empty(z.shape[0], z.shape[1] // 2)


@torch.library.custom_op("nestrec::swiglu_backward", mutates_args=())
def swiglu_backward(grad: torch.Tensor, z: torch.Tensor, again: bool) -> list[torch.Tensor]:
    """Gradient of z; with `again` also the output of `swiglu`."""
    from nestrec.ops.row_kernels import swiglu_backward_kernel

    check_rows(grad, z)
    grad_z = torch.empty_like(z)
    out = torch.empty_like(grad) if again else None
    swiglu_backward_kernel[_part_grid(grad)](
        grad, z, grad_z, grad if out is None else out, len(z), **_part_tile(grad.shape[1]), AGAIN=again
    )
    return [grad_z] if out is None else [grad_z, out]


@swiglu_backward.register_fake
def _(grad: torch.Tensor, z: torch.Tensor, again: bool) -> list[torch.Tensor]:
    return [torch.empty_like(z), torch.empty_like(grad)] if again else [torch.empty_like(z)]


@torch.library.custom_op("nestrec::embed_rows", mutates_args=())
def embed_rows(
    x: torch.Tensor, table: torch.Tensor, position: torch.Tensor, out_type: torch.dtype, factor: float,
    key: torch.Tensor | None, site: int, threshold: int, scale: float,
) -> torch.Tensor:  # fmt: skip
    """dropout(factor * x + table[position])."""
    from nestrec.ops.row_kernels import embed_forward_kernel

    check_rows(x, table)
    out = _empty(x, out_type)
    embed_forward_kernel[_grid(x)](
        x, position, table, out, x if key is None else key, len(x), factor, site, threshold, scale,
        **_tile(x.shape[1]), HAS_DROPOUT=key is not None,
    )  # fmt: skip
    return out


@embed_rows.register_fake
def _(
    x: torch.Tensor, table: torch.Tensor, position: torch.Tensor, out_type: torch.dtype, factor: float,
    key: torch.Tensor | None, site: int, threshold: int, scale: float,
) -> torch.Tensor:  # fmt: skip
    return _empty(x, out_type)


@torch.library.custom_op("nestrec::embed_rows_backward", mutates_args=())
def embed_rows_backward(
    grad: torch.Tensor, out_type: torch.dtype, factor: float,
    key: torch.Tensor | None, site: int, threshold: int, scale: float,
) -> torch.Tensor:  # fmt: skip
    """Gradient of x."""
    from nestrec.ops.row_kernels import embed_backward_kernel

    check_rows(grad)
    out = _empty(grad, out_type)
    embed_backward_kernel[_grid(grad)](
        grad, out, grad if key is None else key, len(grad), factor, site, threshold, scale, **_tile(grad.shape[1]),
        HAS_DROPOUT=key is not None,
    )  # fmt: skip
    return out


@embed_rows_backward.register_fake
def _(
    grad: torch.Tensor, out_type: torch.dtype, factor: float,
    key: torch.Tensor | None, site: int, threshold: int, scale: float,
) -> torch.Tensor:  # fmt: skip
    return _empty(grad, out_type)


@torch.library.custom_op("nestrec::position_gradient", mutates_args=())
def position_gradient(
    grad: torch.Tensor, offsets: torch.Tensor, num_positions: int,
    key: torch.Tensor | None, site: int, threshold: int, scale: float,
) -> torch.Tensor:  # fmt: skip
    """(num_positions, width) float32 gradient of the table."""
    from nestrec.ops.row_kernels import position_gradient_kernel

    check_rows(grad)
    width = grad.shape[1]
    block = min(1024, power_of_two(width))
    out = torch.empty(num_positions, width, dtype=torch.float32, device=grad.device)
    position_gradient_kernel[num_positions, -(-width // block)](
        grad, offsets, grad if key is None else key, out, len(offsets) - 1, site, threshold, scale,
        WIDTH=width, BLOCK=block, BATCH=_rows(block), HAS_DROPOUT=key is not None, num_warps=8,
    )  # fmt: skip
    return out


@position_gradient.register_fake
def _(
    grad: torch.Tensor, offsets: torch.Tensor, num_positions: int,
    key: torch.Tensor | None, site: int, threshold: int, scale: float,
) -> torch.Tensor:  # fmt: skip
    return torch.empty(num_positions, grad.shape[1], dtype=torch.float32, device=grad.device)


@torch.library.custom_op("nestrec::scale_rows", mutates_args=())
def scale_rows(x: torch.Tensor, factor: float, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """factor * x / max(|x|, eps), and one over that maximum."""
    from nestrec.ops.row_kernels import unit_forward_kernel

    check_rows(x)
    out, inverse = torch.empty_like(x), _column(x)
    unit_forward_kernel[_grid(x)](x, out, inverse, len(x), eps, factor, **_tile(x.shape[1]))
    return out, inverse


@scale_rows.register_fake
def _(x: torch.Tensor, factor: float, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), _column(x)


@torch.library.custom_op("nestrec::scale_rows_backward", mutates_args=())
def scale_rows_backward(
    grad: torch.Tensor, x: torch.Tensor, inverse: torch.Tensor, factor: float, eps: float
) -> torch.Tensor:
    from nestrec.ops.row_kernels import unit_backward_kernel

    check_rows(grad, x)
    out = torch.empty_like(x)
    unit_backward_kernel[_grid(x)](grad, x, inverse, out, len(x), eps, factor, **_tile(x.shape[1]))
    return out


@scale_rows_backward.register_fake
def _(grad: torch.Tensor, x: torch.Tensor, inverse: torch.Tensor, factor: float, eps: float) -> torch.Tensor:
    return torch.empty_like(x)


def check_rows(*rows: torch.Tensor | None) -> None:
    """Packed matrices; callers make them so, and what is not is refused."""
    for x in rows:
        if x is not None and (x.dim() != 2 or not x.is_contiguous()):
            raise UserError(
                "the kernel reads packed (tokens, channels) matrices", field="shape, strides",
                value=(tuple(x.shape), x.stride()), remedy="call .contiguous() first",
            )  # fmt: skip


def check_strided(x: torch.Tensor) -> None:
    """A matrix whose channels lie side by side; its rows may be apart."""
    if x.dim() != 2 or (x.shape[1] > 1 and x.stride(1) != 1):
        raise UserError(
            "the channels of a token must lie side by side", field="shape, strides",
            value=(tuple(x.shape), x.stride()), remedy="call .contiguous() first",
        )  # fmt: skip


def check_parts(parts: Sequence[torch.Tensor], gate: torch.Tensor) -> None:
    for x in (*parts, gate):
        check_strided(x)
    widths = [x.shape[1] for x in parts]
    if len(parts) not in (1, 3) or len(set(widths)) > 1 or sum(widths) != gate.shape[1]:
        raise UserError(
            "one part, or three of one width, together as wide as the gate", field="widths", value=(widths, gate.shape)
        )


def _three(parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (parts[0], parts[1], parts[2]) if len(parts) == 3 else (parts[0], parts[0], parts[0])


def _empty(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def _column(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape[0], dtype=torch.float32, device=x.device)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def _rows(block: int, parts: int = 1) -> int:
    return max(1, TILE // (block * power_of_two(parts)))


def _tile(width: int, parts: int = 1) -> dict[str, Any]:
    """Whole rows."""
    block = power_of_two(width)
    rows = _rows(block, parts)
    return {"WIDTH": width, "BLOCK": block, "ROWS": rows, "num_warps": 8 if block * rows >= 2048 else 4}


def _grid(x: torch.Tensor, parts: int = 1) -> tuple[int]:
    rows = _rows(power_of_two(x.shape[1]), parts)
    return (max(1, -(-len(x) // rows)),)


def _part_tile(width: int) -> dict[str, Any]:
    """Parts of rows of at most 1024 channels."""
    block = min(1024, power_of_two(width))
    return {"WIDTH": width, "BLOCK": block, "ROWS": _rows(block), "num_warps": 8}


def _part_grid(x: torch.Tensor) -> tuple[int, int]:
    block = min(1024, power_of_two(x.shape[1]))
    return (max(1, -(-len(x) // _rows(block))), -(-x.shape[1] // block))
