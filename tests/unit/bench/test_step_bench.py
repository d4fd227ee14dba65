"""FLOP counts compared with published ones, assignment of kernels to parts, and small runs of the benchmarks."""

import numpy as np
import pytest

from nestrec.base.errors import UserError
from nestrec.models import FuXiConfig, HSTUConfig
from nestrec_bench.harness.step_flops import StepFlops, step_flops
from nestrec_bench.kernels.layer_bench import LayerBenchConfig, measure_layers
from nestrec_bench.pages.step_profile import idle_time, part_name, summed
from nestrec_bench.step.step_bench import StepBenchConfig, encoder_of, measure_steps


def test_step_flops_equal_published_counts():
    """recsys-examples: 32 sequences of 4099 tokens, 8 layers of 1024, 4 heads of 256: 26.41 + 6.60 and 30.88 TFLOP."""
    cfg = HSTUConfig(dim=1024, num_layers=8, num_heads=4, head_dim=256)
    flops = step_flops(cfg, np.full(32, 4099))
    assert flops.projections / 1e12 == pytest.approx(26.41 + 6.60, rel=1e-3)
    assert flops.attention / 1e12 == pytest.approx(30.88, rel=2e-3)
    assert flops.mfu(0.187) == pytest.approx(0.345, rel=2e-3)


def test_step_flops_fuxi_count_every_matrix_and_channel():
    cfg = FuXiConfig(dim=64, num_layers=2, num_heads=2, head_dim=16, ffn_dim=128)
    flops = step_flops(cfg, np.array([3, 5]))
    assert flops.projections == 6 * 8 * 2 * (64 * 6 * 32 + 3 * 32 * 64 + 3 * 64 * 128)
    assert flops.attention == 2 * (7 + 2 * 3) * (3 * 4 + 5 * 6) * 32


def test_step_profile_assigns_kernels_to_parts():
    names = {
        "nvjet_hsh_256x128": "matmul",
        "norm_forward_kernel": "rows",
        "bias_position_kernel": "attention",
        "void multi_tensor_apply_kernel<adam>": "optimizer",
        "_forward": "loss",
        "Memcpy HtoD": "copies",
        "x": "other",
    }
    assert {name: part_name(name) for name in names} == names
    found = summed({"nvjet": (2.0, 3.0), "x": (1.0, 1.0)}, StepFlops(4e9, 1e9), idle_ms=0.5)
    assert found["matmul"]["tflops"] == 2.0
    assert found["idle"]["ms"] == 0.5


def test_step_profile_idle_time_excludes_all_streams():
    assert idle_time([]) == 0.0
    assert idle_time([(10.0, 12.0), (0.0, 4.0), (1.0, 2.0), (3.0, 7.0), (12.5, 13.0)]) == 3.5


def test_step_bench_rejects_unknown_case():
    with pytest.raises(UserError, match="expected a case of the form MODEL-HEADSxDIM-LENGTHS"):
        encoder_of(StepBenchConfig(), "hstu")
    with pytest.raises(UserError, match="8x64"):
        encoder_of(StepBenchConfig(), "hstu-8-u1024")


def test_step_bench_recompute_uses_activation_checkpointing():
    encoder, _ = encoder_of(StepBenchConfig(recompute=True), "hstu-4x256-u1024")
    assert isinstance(encoder, HSTUConfig)
    assert encoder.activation_checkpointing


def test_step_bench_trains_every_model():
    lengths = "lognormal:mean=16,max=60,count=16"
    bench = StepBenchConfig(
        cases=tuple(f"hstu-2x8-{lengths},fuxi-2x8-u128".split(",")),
        tokens=256,
        dim=16,
        num_layers=1,
        num_items=300,
        num_negatives=4,
        device="cpu",
        precision="fp32",
        warm_up=1,
        steps=1,
        profiled=0,
        memory_length=24,
    )
    rows = list(measure_steps(bench))
    steps, memory = rows[:3], rows[3:]
    assert [(row["model"], row["biases"]) for row in steps] == [
        (f"hstu-2x8-{lengths}", "none"),
        (f"hstu-2x8-{lengths}", "tables"),
        ("fuxi-2x8-u128", "tables"),
    ]
    assert [row["tokens"] for row in steps] == [256] * 3
    assert [row["computed_tokens"] for row in memory] == [48, 48, 96, 96]
    assert all(0.0 < row["loss"] < 10.0 and row["step_ms"] > 0 for row in steps)


def test_layer_bench_compares_kernels_with_plain_torch():
    biases = ("none", "tables", "functional")
    bench = LayerBenchConfig(lengths=("u9x3",), dim=16, heads=("2x8",), biases=biases, device="cpu", repeats=1)
    rows = list(measure_layers(bench))
    assert [(row["biases"], row["impl"]) for row in rows] == [
        (each, impl) for each in biases for impl in ("fused", "recompute", "eager")
    ]
    assert all(row["rel_err"] < 1e-5 for row in rows)
