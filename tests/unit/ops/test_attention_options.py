"""Flat arguments of the attention operators: their schemas are stored here, since compiled graphs contain them."""

import pytest
import torch

import nestrec.ops.attention.hstu_op  # noqa: F401  # defines the operators
from nestrec.ops.attention.attention_inputs import OPTIONS_SCHEMA, AttentionOptions, attention_options
from nestrec.ops.attention.mask_and_bias import AttentionMask, RelativeBias

ARGUMENTS = (
    "Tensor q_THD, Tensor k_THD, Tensor v_THD, Tensor offsets, Tensor? position_table, Tensor? time_table, "
    "Tensor? time_function, Tensor? time_T, Tensor? query_time_T, Tensor? buckets, Tensor? num_targets_B, "
    "SymInt num_context, SymInt? max_attention_length, bool looks_ahead, SymInt max_length, float normalizer"
)


@pytest.mark.parametrize(
    ("name", "schema"),
    [
        ("hstu_attention", f"nestrec::hstu_attention({ARGUMENTS}) -> Tensor"),
        ("hstu_attention_backward", f"nestrec::hstu_attention_backward(Tensor grad_THD, {ARGUMENTS}) -> Tensor[]"),
    ],
)
def test_attention_operator_schema_is_stable(name, schema):
    assert str(getattr(torch.ops.nestrec, name).default._schema) == schema


def test_attention_options_have_order_of_schema():
    names = [argument.split()[1] for argument in OPTIONS_SCHEMA.split(", ")]
    assert tuple(names) == AttentionOptions._fields


@pytest.mark.parametrize("time_bias", ["time_table", "time_function"])
def test_attention_options_restore_bias_and_rules(time_bias):
    position, time, seconds, query_times, buckets, targets = (torch.full((2,), float(i)) for i in range(6))
    bias = RelativeBias(
        position_table=position, time_T=seconds, query_time_T=query_times, buckets=buckets, **{time_bias: time}
    )
    rules = AttentionMask(num_targets_B=targets, num_context=3, max_attention_length=7, looks_ahead=False)
    options = AttentionOptions(*tuple(attention_options(bias, rules)))
    # Dataclasses compare tensors element by element, so each field is compared by identity.
    for found, original in ((options.bias, bias), (options.rules, rules)):
        for name in original.__dataclass_fields__:
            assert getattr(found, name) is getattr(original, name), name
    assert attention_options(RelativeBias(), AttentionMask()) == (*(None,) * 7, 0, None, True)
