"""Forward and backward pass of HSTU attention: selects the kernel that computes each tensor.

Hopper GPUs use the Hopper kernels if these support the inputs; everything else uses the portable Triton kernel. The
module docstrings of both list which launch computes which tensor. No pass synchronizes with the device.
"""

import torch

from nestrec.ops.attention import hstu_triton as plain
from nestrec.ops.attention.attention_inputs import LARGEST_HEAD, AttentionInputs, Gradients
from nestrec.ops.attention.bias_gradients import table_gradients
from nestrec.ops.attention.mask_and_bias import RelativeBias
from nestrec.ops.attention.pair_tiles import fits, needs_pairs
from nestrec.ops.attention.work_schedule import WorkOrder, make_schedule
from nestrec.ops.kernel_op import IS_INTERPRETED


def forward_pass(
    q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, inputs: AttentionInputs
) -> torch.Tensor:
    """Compute HSTU attention, (T, H, D)."""
    if q_THD.shape[0] == 0:
        return torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    if _suits_hopper(q_THD, inputs):
        from nestrec.ops.attention.hopper import hopper_launches as hopper

        return hopper.forward_pass(q_THD, k_THD, v_THD, inputs)
    return plain.weights((q_THD, k_THD, v_THD), _plain_schedule(q_THD, inputs), inputs, is_reversed=False)


def backward_pass(
    grad_THD: torch.Tensor, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, inputs: AttentionInputs
) -> Gradients:
    """Compute the gradients of queries, keys, values and learned biases."""
    if q_THD.shape[0] == 0:
        return _no_gradients(q_THD, inputs.bias)
    if _suits_hopper(q_THD, inputs):
        from nestrec.ops.attention.hopper import hopper_launches as hopper

        return hopper.backward_pass(grad_THD, q_THD, k_THD, v_THD, inputs)
    tables: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if not inputs.bias.is_empty:
        tables = table_gradients(grad_THD, q_THD, k_THD, v_THD, inputs)
    schedule = _plain_schedule(q_THD, inputs)
    dq = plain.gradient((q_THD, grad_THD), (k_THD, v_THD), schedule, inputs, is_reversed=False)
    dk = plain.gradient((k_THD, v_THD), (q_THD, grad_THD), schedule, inputs, is_reversed=True)
    dv = plain.weights((k_THD, q_THD, grad_THD), schedule, inputs, is_reversed=True)
    return Gradients(dq, dk, dv, *tables)


def _no_gradients(q_THD: torch.Tensor, bias: RelativeBias) -> Gradients:
    dq, dk, dv = (torch.empty_like(q_THD, memory_format=torch.contiguous_format) for _ in range(3))
    learned = (bias.position_table, bias.time_table, bias.time_function)
    return Gradients(dq, dk, dv, *(None if x is None else torch.zeros_like(x) for x in learned))


def _plain_schedule(q_THD: torch.Tensor, inputs: AttentionInputs) -> WorkOrder:
    return make_schedule(inputs.offsets, q_THD.shape[0], plain.blocks_for(q_THD.shape[2], q_THD.dtype).x)


def supports_time_function(q_THD: torch.Tensor, inputs: AttentionInputs) -> bool:
    """Return whether kernels support attention with a time function for these inputs, including its gradient."""
    if not _suits_hopper(q_THD, inputs):
        return False
    from nestrec.ops.attention.hopper.hopper_launches import saves_score_gradients

    return saves_score_gradients(q_THD, inputs)


def reads_buckets(offsets: torch.Tensor, num_tokens: int, max_length: int, bias: RelativeBias) -> bool:
    """Return whether the kernels of this device read the time buckets of all pairs from memory."""
    return _is_hopper(offsets) and fits(bias, offsets, num_tokens, max_length, is_square=False)


def _is_hopper(x: torch.Tensor) -> bool:
    return not IS_INTERPRETED and torch.cuda.get_device_capability(x.device)[0] == 9


def _suits_hopper(q_THD: torch.Tensor, inputs: AttentionInputs) -> bool:
    has_targets = inputs.rules.num_targets_B is not None
    return (
        _is_hopper(q_THD)
        and q_THD.dtype in (torch.bfloat16, torch.float16)
        and q_THD.shape[2] <= LARGEST_HEAD
        and (
            not needs_pairs(inputs.bias, has_targets=has_targets)
            or fits(inputs.bias, inputs.offsets, len(q_THD), inputs.max_length, is_square=inputs.is_square)
        )
    )
