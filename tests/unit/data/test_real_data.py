"""Public datasets, prepared from their original files, have their published counts and measured distributions."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nestrec.data.dataset import Dataset
from nestrec.data.dataset_card import DatasetCard
from nestrec.data.formats.format_registry import prepare
from nestrec.data.prepare.prepare_options import LogColumns

TAOBAO = LogColumns(
    column_names=("user", "item", "category", "what", "time"),
    time="time",
    categories=("category",),
    actions={name: f"what={name}" for name in ("pv", "cart", "fav", "buy")},
)
ORDERED_ML_1M = LogColumns(user="user_id", item="movie_id", position="pos", rating="rating", separator="\t")


def prepared(source: Path, output: Path, format: str, **options: Any) -> tuple[DatasetCard, Dataset]:
    if not source.exists():
        pytest.skip(f"{source.name} is not available in NESTREC_DATA")
    card = prepare(format, source, output, **options)
    return card, Dataset.open(output)


@pytest.mark.parametrize(
    ("format", "path", "options", "counts", "mu_sd", "zipf_s"),
    [
        ("movielens", "ml-100k", {}, (943, 1682, 100_000), (4.27, 0.88), 0.65),
        ("user_lines", "amazon-beauty/beauty_5core_lines.txt.gz", {}, (22_363, 12_101, 198_502), (2.02, 0.49), 0.60),
        ("sasrec_pairs", "amazon-beauty/beauty_pairs.txt.gz", {}, (40_226, 54_542, 353_962), (2.02, 0.48), 0.68),
        ("sasrec_pairs", "wikipedia-edits/wikipedia_pairs.txt.gz", {}, (8_227, 1_000, 157_474), (1.34, 1.52), 0.46),
        ("log", "ml-1m/seq_rating_ge3.tsv.gz", {"log": ORDERED_ML_1M}, (6_038, 3_307, 835_789), (4.44, 0.98), 0.65),
        ("kuairand", "kuairand-pure", {"duplicates": "keep"}, (21_184, 5_564, 94_784), (1.14, 0.84), 0.74),
        ("log", "taobao-mini/UserBehavior_4321.csv.gz", {"log": TAOBAO}, (43, 3_276, 4_321), (4.30, 0.82), 0.39),
    ],
)
def test_public_datasets_have_published_counts_and_shapes(  # noqa: PLR0917
    data_folder: Path,
    tmp_path: Path,
    format: str,
    path: str,
    options: dict[str, Any],
    counts: tuple[int, int, int],
    mu_sd: tuple[float, float],
    zipf_s: float,
) -> None:
    card, dataset = prepared(data_folder / path, tmp_path / "out", format, **options)
    assert (card.counts.users, card.counts.items, card.counts.events) == counts
    assert (card.lengths.ln_mean, card.lengths.ln_sd) == pytest.approx(mu_sd, abs=0.006)
    assert card.popularity.zipf_s == pytest.approx(zipf_s, abs=0.006)
    assert not card.counts.quarantined
    dataset.verify()
    assert int(dataset.lengths.sum()) == int(dataset.items()["count"].to_numpy().sum()) == counts[2]


def test_ml_100k_is_in_time_order_with_ties_in_file_order(data_folder: Path, tmp_path: Path) -> None:
    _, dataset = prepared(data_folder / "ml-100k", tmp_path / "out", "movielens")
    rows = dataset.rows(np.arange(dataset.num_samples))
    times, offsets = rows.lists["timestamps_ms"]
    is_inside = np.ones(times.size - 1, dtype=np.bool_)
    is_inside[offsets[1:-1] - 1] = False
    gaps = np.diff(times)[is_inside]
    assert gaps.min() == 0
    assert 0.49 < (gaps == 0).mean() < 0.53
    assert times.min() > 874_000_000_000
    assert {f.name for f in dataset.card.user_features} == {"age", "gender", "occupation", "zip_code"}


def test_ml_1m_order_agrees_with_timestamps_of_the_sample(data_folder: Path, tmp_path: Path) -> None:
    folder = data_folder / "ml-1m"
    _, ordered = prepared(folder / "seq_rating_ge3.tsv.gz", tmp_path / "ordered", "log", log=ORDERED_ML_1M)
    _, sample = prepared(folder / "ratings_sample_100k.dat.gz", tmp_path / "sample", "movielens", min_rating=3.0)
    assert "timestamps_ms" not in ordered.columns
    keys = ordered.items().column("item_key").to_pylist()
    all_rows = ordered.rows(np.arange(ordered.num_samples))
    users = ordered.user_keys(all_rows.indices)
    items, offsets = all_rows.lists["item_ids"]
    position_of = {
        (users[u], keys[items[i] - 1]): i for u in range(len(users)) for i in range(offsets[u], offsets[u + 1])
    }
    timed = sample.rows(np.arange(sample.num_samples))
    sample_keys = sample.items().column("item_key").to_pylist()
    num_pairs = 0
    for u, user in enumerate(sample.user_keys(timed.indices)):
        part = slice(*timed.lists["item_ids"][1][u : u + 2])
        times = timed.lists["timestamps_ms"][0][part]
        positions = [position_of.get((user, sample_keys[i - 1]), -1) for i in timed.lists["item_ids"][0][part]]
        pairs = sorted((p, t) for p, t in zip(positions, times, strict=True) if p >= 0)
        assert all(a[1] <= b[1] for a, b in itertools.pairwise(pairs))
        num_pairs += max(0, len(pairs) - 1)
    assert num_pairs > 70_000


def test_ml_1m_sample_has_titles_genres_and_users(data_folder: Path, tmp_path: Path) -> None:
    card, dataset = prepared(data_folder / "ml-1m/ratings_sample_100k.dat.gz", tmp_path / "out", "movielens")
    assert card.counts.events == 100_000
    items = dataset.items()
    titles = items.column("item_title").to_pylist()
    assert all(titles)
    assert any(":" in title for title in titles)
    assert {f.name: f.vocabulary_size for f in card.item_features}["genres"] == 19
    assert {f.name: f.vocabulary_size for f in card.user_features}["occupation"] == 22
    assert (dataset.rows(np.arange(card.counts.users)).scalars["user_gender"] > 0).all()


def test_beauty_attributes_cover_every_item(data_folder: Path, tmp_path: Path) -> None:
    _, dataset = prepared(data_folder / "amazon-beauty/beauty_5core_lines.txt.gz", tmp_path / "out", "user_lines")
    attributes = dataset.items().column("item_attributes")
    assert attributes.null_count == 0
    assert min(len(a) for a in attributes.to_pylist()) >= 1


def test_beauty_five_core_filter_leaves_five_events_each(data_folder: Path, tmp_path: Path) -> None:
    source = data_folder / "amazon-beauty/beauty_pairs.txt.gz"
    card, dataset = prepared(source, tmp_path / "out", "sasrec_pairs", min_events_per_user=5, min_events_per_item=5)
    assert dataset.lengths.min() >= 5
    assert dataset.items()["count"].to_numpy().min() >= 5
    assert card.counts.filtered["rare users and items"] == 353_962 - card.counts.events


def test_kuairand_pure_counts_ranges_and_action_rates(data_folder: Path, tmp_path: Path) -> None:
    card, dataset = prepared(data_folder / "kuairand-pure", tmp_path / "out", "kuairand")
    assert 0.025 < card.counts.duplicates_dropped / card.counts.rows_read < 0.033
    sizes = {f.name: f.vocabulary_size for f in card.user_features}
    ranges = ["active_degree", "follow_user_num_range", "fans_user_num_range", "friend_user_num_range"]
    assert [sizes[n] for n in [*ranges, "register_days_range"]] == [10, 9, 10, 8, 9]
    assert len(card.user_features) == 34, "four of them are computed from the earlier histories"
    assert len(card.item_features) == 11
    rows = dataset.rows(np.arange(dataset.num_samples))
    assert (rows.scalars["user_onehot_feat4"] == 0).any()
    actions = rows.lists["actions"][0]
    rates = {name: float((actions & bit != 0).mean()) for name, bit in card.action_bits.items()}
    assert rates["click"] == pytest.approx(0.442, abs=0.02)
    assert rates["long_view"] == pytest.approx(0.311, abs=0.02)
    assert rates["like"] == pytest.approx(0.0171, abs=0.002)
    times, offsets = rows.lists["timestamps_ms"]
    is_inside = np.ones(times.size - 1, dtype=np.bool_)
    is_inside[offsets[1:-1] - 1] = False
    assert np.diff(times)[is_inside].min() >= 0


def test_criteo_sample_has_expected_click_rate(data_folder: Path, tmp_path: Path) -> None:
    card, dataset = prepared(data_folder / "criteo-sample/criteo_first_7000.txt.gz", tmp_path / "out", "criteo")
    rows = dataset.rows(np.arange(7000))
    assert card.kind == "rows"
    assert rows.scalars["label"].mean() == pytest.approx(0.218, abs=0.001)
    assert rows.lists["dense"][0].size == 7000 * 13
    assert np.diff(rows.lists["categories"][1]).tolist() == [26] * 7000
