"""Engine step benchmark: rows of every model and step, relative to the first model."""

from dataclasses import replace

from nestrec_bench.serving.engine_step_bench import EngineBenchConfig, measure_engine


def test_engine_bench_has_row_per_model_and_step():
    bench = EngineBenchConfig(tokens=(16,), candidates=(4,), rounds=1)
    bench = replace(bench, encoder=replace(bench.encoder, dim=8, num_layers=1, head_dim=4))
    rows = list(measure_engine(bench))
    assert {(row["model"], row["step"]) for row in rows} == {
        (model, step) for model in bench.models for step in ("prefix", "rank", "full")
    }
    assert all(row["ms"] > 0 and row["in_process"] for row in rows)
    assert {row["of_first"] for row in rows if row["model"] == "none"} == {1.0}
