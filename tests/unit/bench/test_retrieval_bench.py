from nestrec_bench.serving.retrieval_bench import RetrievalBenchConfig, measure_retrieval


def test_retrieval_bench_rows_contain_speed_and_recall():
    bench = RetrievalBenchConfig(items=(300,), dim=8, k=10, batch=(1, 4), seen=5, rounds=2)
    one, four = measure_retrieval(bench)
    assert (one["items"], one["dim"], one["k"], one["batch"], four["batch"]) == (300, 8, 10, 1, 4)
    assert one["exact"]
    assert one["recall"] == 1.0
    assert one["device_ms"] is None  # device time is measured on GPUs only
    assert 0 < one["p50_ms"] <= one["p99_ms"]
    assert four["qps"] > 0


def test_retrieval_bench_batch_inference_reports_users_per_s():
    bench = RetrievalBenchConfig(items=(300,), dim=8, k=10, seen=5, users=20)
    rows = list(measure_retrieval(bench))
    assert [row["users"] for row in rows] == [20, 20, 20]
    assert all(row["users_a_second"] > 0 for row in rows)
