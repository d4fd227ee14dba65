import json

from nestrec.base.config import dumps
from nestrec_bench.quality.choices_bench import BENCH, ChoicesBenchConfig
from support.tiny_runs import config_of, make_datasets


def test_choices_bench_compares_with_first_and_resumes(tmp_path):
    make_datasets(tmp_path)
    recipe = tmp_path / "config.json"
    recipe.write_text(dumps(config_of("sasrec", tmp_path, {"name": "tiny"})))
    bench = ChoicesBenchConfig(
        choices=("float32:", "bfloat16:tables.items.dtype=bfloat16"),
        options="batch.batch_size=16+training.early_stopping_patience=2",
        recipe=str(recipe),
        seeds=(1,),
        epochs=1,
        exact_steps=4,
        output=str(tmp_path / "runs"),
    )
    rows, more = [], {}
    measured = BENCH.measure(bench)
    try:
        while True:
            rows.append(next(measured))
    except StopIteration as ended:
        more = ended.value
    assert [row["choice"] for row in rows] == ["float32", "bfloat16"]
    assert [row["weight_bytes"] for row in rows] == [row["vector_bytes_a_row"] for row in rows] == [32, 16]
    assert rows[0]["table_bytes"] > rows[1]["table_bytes"]
    tested = json.loads((tmp_path / "runs/float32-1/eval/test.json").read_text())["metrics"]["model"]["ndcg@10"]
    assert rows[0]["metrics"]["ndcg@10"] == round(tested[0], 5)
    assert more["nested_equals_serial"] == {"float32": True, "bfloat16": True}
    [comparison] = more["comparisons"]
    assert (comparison["recipe"], comparison["against"]) == ("tiny_bfloat16", "tiny_float32")
    [difference] = [row for row in more["differences"] if row["metric"] == "ndcg@10"]
    assert difference["difference"] == rows[1]["metrics"]["ndcg@10"] - rows[0]["metrics"]["ndcg@10"]
    lines = [json.loads(line) for line in (tmp_path / "runs/bfloat16-1/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    [curve] = [row for row in more["loss_curves"] if row["choice"] == "bfloat16"]
    assert curve["loss"] == sum(losses) / len(losses)
    before = (tmp_path / "runs/float32-1/metrics.jsonl").read_text()
    assert next(iter(BENCH.measure(bench))) == rows[0]
    assert (tmp_path / "runs/float32-1/metrics.jsonl").read_text() == before, "not trained again"
