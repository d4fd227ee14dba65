import json
import math
from pathlib import Path

import pytest

from nestrec.base.errors import CorruptFileError, UserError
from nestrec_bench.pages.quality_page import comparison_rows, quality_page, quality_rows
from support.example_run import USERS, make_evaluation, write_ranks


def test_quality_rows_equal_manual_computation(tmp_path: Path) -> None:
    runs = [
        write_ranks(tmp_path / "b", "hstu", 2, [0, 1, 12, 7]),
        write_ranks(tmp_path / "a", "hstu", 1, [1, 3, 0, 50]),
    ]
    (row,) = quality_rows(runs)
    assert row["recipe"] == "hstu"
    assert row["dataset"] == "four users"
    assert row["model"] == "hstu"
    assert row["seeds"] == [1, 2]
    assert row["users"] == 4
    # Within rank 10, seeds 1 and 2 each have hits for two of four users; within rank 50, for three.
    assert row["recall@10"] == pytest.approx(0.5)
    assert row["recall@10_of_seeds"] == pytest.approx([0.5, 0.5])
    assert row["hr@50"] == pytest.approx(0.75)
    ndcg_1 = (1 + 1 / 2) / 4
    ndcg_2 = (1 + 1 / math.log2(8)) / 4
    assert row["ndcg@10_of_seeds"] == pytest.approx([ndcg_1, ndcg_2])
    assert row["ndcg@10"] == pytest.approx((ndcg_1 + ndcg_2) / 2)
    assert row["ndcg@10_seed_sd"] == pytest.approx(abs(ndcg_1 - ndcg_2) / math.sqrt(2))
    assert row["mrr@10"] == pytest.approx((1 + 1 / 3 + 1 + 1 / 7) / 8)
    low, high = row["recall@10_interval"]
    assert 0 <= low < 0.5 < high <= 1
    assert row["baselines"]["popularity"]["recall@10"] == pytest.approx(0.25)


def test_quality_users_are_matched_by_id(tmp_path: Path) -> None:
    first = write_ranks(tmp_path / "a", "hstu", 1, [1, 2, 0, 0])
    second = write_ranks(tmp_path / "b", "sasrec", 1, [0, 0, 2, 1], users=USERS[::-1])
    (row,) = comparison_rows([first, second], [("hstu", "sasrec")])
    assert row["ndcg@10_difference"] == 0
    assert row["ndcg@10_difference_interval"] == [0, 0]


def test_paired_difference_averages_seeds_first(tmp_path: Path) -> None:
    better = [write_ranks(tmp_path / f"h{seed}", "hstu", seed, [1, 1, 1, 1]) for seed in (1, 2)]
    worse = [
        write_ranks(tmp_path / "s1", "sasrec", 1, [1, 0, 0, 1]),
        write_ranks(tmp_path / "s2", "sasrec", 2, [0, 0, 1, 1]),
    ]
    (row,) = comparison_rows([*worse, *better], [("hstu", "sasrec")])
    assert (row["recipe"], row["against"]) == ("hstu", "sasrec")
    assert (row["seeds"], row["against_seeds"]) == ([1, 2], [1, 2])
    assert row["recall@10_difference"] == pytest.approx((0.5 + 1 + 0.5 + 0) / 4)
    low, high = row["recall@10_difference_interval"]
    assert 0 <= low < 0.5 < high <= 1


def test_paired_difference_reports_seed_variance(tmp_path: Path) -> None:
    first = [write_ranks(tmp_path / f"h{s}", "hstu", s, r) for s, r in ((1, [1, 1, 1, 1]), (2, [1, 1, 0, 0]))]
    second = [write_ranks(tmp_path / f"s{s}", "sasrec", s, r) for s, r in ((1, [1, 0, 0, 0]), (2, [0, 0, 1, 0]))]
    (row,) = comparison_rows([*first, *second], [("hstu", "sasrec")])
    # Recall of the seeds is 1 and 1/2 against 1/4 and 1/4.
    assert row["recall@10_difference_of_seeds"] == pytest.approx([3 / 4, 1 / 4])
    assert row["recall@10_difference_seed_error"] == pytest.approx(math.sqrt(1 / 8 / 2))
    (row,) = comparison_rows([first[0], *second], [("hstu", "sasrec")])
    assert row["recall@10_difference_seed_error"] is None


def test_paired_difference_requires_same_seeds(tmp_path: Path) -> None:
    ranks = {1: [1, 1, 1, 1], 2: [1, 0, 0, 0]}
    first = [write_ranks(tmp_path / f"h{seed}", "hstu", seed, ranks[seed]) for seed in (1, 2)]
    second = [write_ranks(tmp_path / f"s{seed}", "sasrec", seed, [*ranks[seed][:-1], 0]) for seed in (2, 1)]
    (row,) = comparison_rows([*first, *second], [("hstu", "sasrec")])
    assert row["recall@10_difference_of_seeds"] == pytest.approx([1 / 4, 0])
    assert row["recall@10_difference_seed_error"] == pytest.approx(1 / 8)  # variance 1/32 of two differences
    other = [write_ranks(tmp_path / f"o{seed}", "fuxi", seed + 1, ranks[seed]) for seed in (1, 2)]
    (row,) = comparison_rows([*first, *other], [("hstu", "fuxi")])
    assert "recall@10_difference_of_seeds" not in row
    assert row["recall@10_difference_seed_error"] == pytest.approx(math.sqrt(2 * (9 / 32) / 2))


def test_quality_omits_metrics_beyond_ranked_depth(tmp_path: Path) -> None:
    (row,) = quality_rows([write_ranks(tmp_path / "a", "hstu", 1, [1, 2, 0, 0], ks=(10,))])
    assert "ndcg@10" in row
    assert "hr@50" not in row
    assert row["ndcg@10_seed_sd"] is None


def test_quality_rejects_incomparable_runs(tmp_path: Path) -> None:
    run = write_ranks(tmp_path / "a", "hstu", 1, [1, 2, 0, 0])
    with pytest.raises(UserError, match="same seed"):
        quality_rows([run, write_ranks(tmp_path / "b", "hstu", 1, [1, 2, 0, 0])])
    other = write_ranks(tmp_path / "c", "sasrec", 1, [1, 2, 0], users=[1, 2, 3])
    assert len(quality_rows([run, other])) == 2
    with pytest.raises(UserError, match="the users differ from those of"):
        comparison_rows([run, other], [("hstu", "sasrec")])
    with pytest.raises(UserError, match="do not contain a run of this recipe"):
        comparison_rows([run], [("hstu", "fuxi")])


def test_quality_page_rejects_run_without_test_result(tmp_path: Path) -> None:
    run = write_ranks(tmp_path / "a", "hstu", 1, [1, 2, 0, 0])
    file = run / "eval" / "test.npz"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CorruptFileError):
        quality_rows([run])
    file.unlink()
    with pytest.raises(UserError, match="does not contain a test result"):
        quality_rows([run])


def test_quality_page_shows_source_intervals_and_spread(tmp_path: Path) -> None:
    runs = [
        write_ranks(tmp_path / f"{name}{seed}", name, seed, [1, 2 * seed, 0, 0])
        for name in ("hstu", "sasrec")
        for seed in (1, 2)
    ]
    rows = quality_rows(runs)
    compared = comparison_rows(runs, [("hstu", "sasrec")])
    frame = {"command": "nestrec bench quality", "date": "2026-05-04", "rows": rows, "comparisons": compared}
    text = quality_page(frame)
    low, high = rows[0]["ndcg@10_interval"]
    assert f"{rows[0]['ndcg@10']:.4f} [{low:.4f}, {high:.4f}] ± {rows[0]['ndcg@10_seed_sd']:.4f}" in text
    assert "`nestrec bench quality`" in text
    assert "+0.0000 [+0.0000, +0.0000]" in text
    assert text.count("popularity") == 1


def test_quality_page_keeps_text_around_tables(tmp_path: Path) -> None:
    rows = quality_rows([write_ranks(tmp_path / "a", "hstu", 1, [1, 2, 0, 0])])
    frame = {"command": "first", "date": "2026-05-04", "rows": rows}
    page = quality_page(frame)
    written = page.replace("# Quality\n", "# Ours\n\nMind the gap.\n") + "\n## After\n"
    again = quality_page(frame | {"command": "second"}, written)
    assert again == written.replace("`first`", "`second`")
    with pytest.raises(UserError, match="does not contain the lines between which the tables are written"):
        quality_page(frame, "# Ours\n")


def test_quality_rows_contain_tested_epoch(tmp_path: Path) -> None:
    run = write_ranks(tmp_path / "a", "hstu", 1, [1, 2, 0, 0])
    records = [make_evaluation(step=10 * epoch, epoch=epoch, part="valid") for epoch in (1, 2, 3)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (run / "eval" / "test.json").write_text('{"step": 20, "part": "test"}')
    (row,) = quality_rows([run, write_ranks(tmp_path / "b", "hstu", 2, [1, 2, 0, 0])])
    assert (row["best_epochs"], row["epochs"]) == ([2, None], [3, None])
    assert row["validations"] == []


def test_quality_rows_contain_common_learning_curve(tmp_path: Path) -> None:
    runs = []
    for seed, num_epochs in ((1, 3), (2, 2)):
        runs.append(write_ranks(tmp_path / f"{seed}", "hstu", seed, [1, 2, 0, 0]))
        records = [make_evaluation(step=10 * epoch, epoch=epoch, part="valid") for epoch in range(1, num_epochs + 1)]
        (runs[-1] / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (row,) = quality_rows(runs)
    values = [make_evaluation(0, epoch, "valid")["metrics"]["model"]["ndcg@10"][0] for epoch in (1, 2)]
    assert row["validations"] == [(1, pytest.approx(values[0])), (2, pytest.approx(values[1]))]
