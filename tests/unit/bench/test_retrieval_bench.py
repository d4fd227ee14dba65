from nestrec.bench.serving.retrieval import RetrievalBench, measure_retrieval


def test_rows_say_what_was_searched_how_fast_and_what_was_found():
    bench = RetrievalBench(items=(300,), dim=8, k=10, batch=(1, 4), seen=5, rounds=2)
    one, four = measure_retrieval(bench)
    assert (one["items"], one["dim"], one["k"], one["batch"], four["batch"]) == (300, 8, 10, 1, 4)
    assert one["exact"]
    assert one["recall"] == 1.0
    assert one["device_ms"] is None  # a device of its own has none here
    assert 0 < one["p50_ms"] <= one["p99_ms"]
    assert four["qps"] > 0
