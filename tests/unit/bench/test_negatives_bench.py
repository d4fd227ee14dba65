"""Negatives benchmark on a CPU: rows of all loss variants, and byte counts."""

import json

from typer.testing import CliRunner

from nestrec_bench.command import app
from nestrec_bench.step.negatives_bench import measure_bytes

SMALL = {"negatives": "3,5", "lookups": "full,float16", "batch": 2, "length": 6, "num_layers": 1, "dim": 8,
         "num_heads": 2, "num_items": 50, "warm_up": 1, "steps": 2, "rounds": 2, "device": "cpu"}  # fmt: skip


def test_negatives_bench_rows_of_all_loss_variants(tmp_path):
    options = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]
    found = CliRunner().invoke(app, ["negatives", *options, "--json", str(tmp_path / "n.json")])
    assert found.exit_code == 0, found.output
    rows = json.loads((tmp_path / "n.json").read_text())["rows"]
    assert [row["variant"] for row in rows] == 2 * ["none", *2 * ["plain", "segments", "fused", "offload"]]
    assert all({"variant", "negatives", "peak_gib", "step_ms", "looked_up_bytes"} <= set(row) for row in rows)
    assert all(0 < row["step_ms_spread"][0] <= row["step_ms"] <= row["step_ms_spread"][1] for row in rows)
    by_lookup = {(row["negatives"], row["lookup"]): row["looked_up_bytes"] for row in rows}
    assert by_lookup[3, "float16"] < by_lookup[3, "full"] < by_lookup[5, "full"]
    assert by_lookup[0, "full"] == by_lookup[0, "float16"] < by_lookup[3, "float16"]
    assert [row["bus_floor_ms"] >= 0 for row in rows if row["variant"] == "offload"] == 4 * [True]


def test_negatives_bench_half_precision_halves_bytes():
    rows = list(measure_bytes(2, tokens=20, dim=4, num_items=500, negatives=(8,)))
    assert [row["lookup"] for row in rows] == ["full", "float16"]
    assert rows[0]["sent_bytes"] > 0
    assert rows[1]["of_full"] == [0.5, 0.5]
