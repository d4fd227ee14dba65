"""Every native layout of every format, read from small files that the tests write."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from nestrec.base.errors import DataError, UserError
from nestrec.data.dataset import Dataset
from nestrec.data.formats.format_registry import prepare
from nestrec.data.prepare.prepare_options import LogColumns


def open_prepared(format: str, source: Path, **options: object) -> Dataset:
    output = source.parent / "prepared"
    prepare(format, source, output, force=True, **options)
    dataset = Dataset.open(output)
    dataset.verify()
    return dataset


def histories(dataset: Dataset) -> dict[str, list[str]]:
    """Returns the item keys of each user key, in order."""
    rows = dataset.rows(np.arange(dataset.num_samples))
    keys = ["", *dataset.items().column("item_key").to_pylist()]
    items, offsets = rows.lists["item_ids"]
    users = dataset.user_keys(rows.indices)
    return {user: [keys[i] for i in items[a:b]] for user, a, b in zip(users, offsets[:-1], offsets[1:], strict=True)}


def events(dataset: Dataset, column: str) -> list[float]:
    return dataset.rows(np.arange(dataset.num_samples)).lists[column][0].tolist()


def item(dataset: Dataset, key: str) -> dict[str, object]:
    return next(row for row in dataset.items().to_pylist() if row["item_key"] == key)


def names(dataset: Dataset, column: str, ids: list[int]) -> list[str]:
    keys = dataset.vocabulary(column).column("key").to_pylist()
    return [keys[i - 1] for i in ids]


def test_movielens_100k_reads_users_and_genre_flags(tmp_path: Path) -> None:
    folder = tmp_path / "ml-100k"
    folder.mkdir()
    (folder / "u.data").write_text("196\t242\t3\t881250949\n186\t302\t5\t891717742\n196\t1\t4\t881250000\n")
    (folder / "u.user").write_text("196|49|M|writer|55105\n186|39|F|executive|00000\n")
    flags = ["0"] * 19
    flags[3] = flags[5] = "1"
    (folder / "u.item").write_bytes(
        "|".join(["1", "Café (1995)", "01-Jan-1995", "", "http://x", *flags]).encode("latin-1")
    )
    dataset = open_prepared("movielens", folder)
    assert histories(dataset) == {"196": ["1", "242"], "186": ["302"]}
    assert events(dataset, "event_rating") == [4.0, 3.0, 5.0]
    assert events(dataset, "actions") == [1, 0, 1]
    assert dict(dataset.card.action_bits) == {"positive": 1}
    film = item(dataset, "1")
    assert film["item_title"] == "Café (1995)"
    assert names(dataset, "item_genres", film["item_genres"]) == ["Animation", "Comedy"]  # type: ignore[arg-type]
    ages = dataset.rows(np.array([0, 1])).scalars["user_age"].tolist()
    assert names(dataset, "user_age", ages) == ["49", "39"]


def test_movielens_1m_titles_may_contain_colons(tmp_path: Path) -> None:
    (tmp_path / "ratings.dat").write_text("1::260::5::978300760\n1::1::3::978300000\n2::260::2::978300000\n")
    (tmp_path / "users.dat").write_text("1::F::1::10::48067\n")
    (tmp_path / "movies.dat").write_bytes(b"260::Star Wars: Episode IV (1977)::Action|Sci-Fi\n1::Caf\xe9::Drama\n")
    dataset = open_prepared("movielens", tmp_path / "ratings.dat")
    assert histories(dataset) == {"1": ["1", "260"], "2": ["260"]}
    assert item(dataset, "260")["item_title"] == "Star Wars: Episode IV (1977)"
    assert item(dataset, "1")["item_title"] == "Café"
    assert dataset.rows(np.array([0, 1])).scalars["user_gender"].tolist() == [1, 0]


def test_text_formats_quarantine_invalid_utf8(tmp_path: Path) -> None:
    (tmp_path / "ratings.dat").write_bytes(b"1::2::5::978300760\n1::\xff::3::978300000\n")
    (tmp_path / "lines.txt").write_bytes(b"1 2 \xff 3\n")
    review = b'{"reviewerID": "A%s", "asin": "B", "overall": 5, "unixReviewTime": 1}\n'
    (tmp_path / "reviews.json").write_bytes(review % b"1" + review % b"\xff")
    for format, name in (("movielens", "ratings.dat"), ("user_lines", "lines.txt"), ("amazon_csv", "reviews.json")):
        counts = open_prepared(format, tmp_path / name, max_bad_fraction=1.0).card.counts
        assert dict(counts.quarantined) == {"not UTF-8": 1}
        assert counts.events == counts.rows_read - 1


def test_text_across_read_blocks_is_decoded_correctly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nestrec.data.prepare.raw_rows.BLOCK_BYTES", 64)
    keys = [f"ключ-{i}-é" for i in range(200)]
    text = "user,item\n" + "".join(f"u,{key}\n" for key in keys)
    for encoding in ("utf-8", "cp1251", "utf-16"):
        expected = keys if encoding != "cp1251" else [key.replace("é", "я") for key in keys]
        (tmp_path / "log.csv").write_bytes((text if expected is keys else text.replace("é", "я")).encode(encoding))
        dataset = open_prepared("log", tmp_path / "log.csv", log=LogColumns(encoding=encoding))
        assert dataset.items().column("item_key").to_pylist() == expected


def test_movielens_20m_reads_quoted_titles(tmp_path: Path) -> None:
    (tmp_path / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,2,3.5,1112486027\n1,29,4.0,1112484676\n")
    (tmp_path / "movies.csv").write_text('movieId,title,genres\n29,"City, The (1995)",Drama|War\n2,Jumanji,Children\n')
    dataset = open_prepared("movielens", tmp_path, min_rating=0.5)
    assert histories(dataset) == {"1": ["29", "2"]}
    assert events(dataset, "event_rating") == [4.0, 3.5]
    assert item(dataset, "29")["item_title"] == "City, The (1995)"


def test_movielens_recbole_reads_types_from_the_header(tmp_path: Path) -> None:
    (tmp_path / "x.inter").write_text(
        "user_id:token\titem_id:token\trating:float\ttimestamp:float\tshop:token\tprice:float\n"
        "a\t7\t4\t10\ts1\t1.5\na\t8\t2\t5\ts2\t\n"
    )
    (tmp_path / "x.item").write_text(
        "item_id:token\tmovie_title:token_seq\tclass:token_seq\n7\tToy Story\tComedy Drama\n"
    )
    dataset = open_prepared("movielens", tmp_path / "x.inter")
    assert histories(dataset) == {"a": ["8", "7"]}
    assert item(dataset, "7")["item_movie_title"] == "Toy Story"
    assert names(dataset, "item_class", item(dataset, "7")["item_class"]) == ["Comedy", "Drama"]  # type: ignore[arg-type]
    shops = [int(i) for i in events(dataset, "event_shop")]
    assert names(dataset, "event_shop", shops) == ["s2", "s1"]
    assert np.isnan(events(dataset, "event_price")[0])


def test_movielens_missing_files_error_names_expected_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"ratings\.dat"):
        prepare("movielens", tmp_path, tmp_path / "out")


def test_pair_and_line_formats_keep_file_order(tmp_path: Path) -> None:
    (tmp_path / "pairs.txt").write_text("1 5\n1 3\n2 5\n1 5\n")
    assert histories(open_prepared("sasrec_pairs", tmp_path / "pairs.txt")) == {"1": ["5", "3", "5"], "2": ["5"]}
    (tmp_path / "lines.txt").write_text("1 5 3 5\n\n 2  5 \n")
    assert histories(open_prepared("user_lines", tmp_path / "lines.txt")) == {"1": ["5", "3", "5"], "2": ["5"]}


def test_user_lines_reads_attributes_and_quarantines_empty_users(tmp_path: Path) -> None:
    (tmp_path / "Toys.txt").write_text("1 5 3\n2\n3 3\n")
    (tmp_path / "Toys_item2attributes.json").write_text(json.dumps({"5": [10, 11], "9": [12]}))
    dataset = open_prepared("user_lines", tmp_path / "Toys.txt", max_bad_fraction=0.5)
    assert dict(dataset.card.counts.quarantined) == {"user without items": 1}
    attributes = item(dataset, "5")["item_attributes"]
    assert names(dataset, "item_attributes", attributes) == ["10", "11"]  # type: ignore[arg-type]
    assert item(dataset, "3")["item_attributes"] == []
    assert dataset.card.item_features[0].vocabulary_size == 4


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("A1,B1,5.0,1400000000\nA1,B2,3.0,1300000000\n", {}),
        ("B1,A1,5.0,1400000000\nB2,A1,3.0,1300000000\n", {"review_columns": ("item", "user", "rating", "timestamp")}),
        ("user_id,parent_asin,rating,timestamp\nA1,B1,5.0,1400000000000\nA1,B2,3.0,1300000000000\n", {}),
        (
            '{"reviewerID": "A1", "asin": "B1", "overall": 5.0, "unixReviewTime": 1400000000}\n'
            '{"reviewerID": "A1", "asin": "B2", "overall": 3, "unixReviewTime": 1300000000, "reviewText": "x"}\n',
            {},
        ),
        (
            '{"user_id": "A1", "parent_asin": "B1", "asin": "z", "rating": 5.0, "timestamp": 1400000000000}\n'
            '{"user_id": "A1", "parent_asin": "B2", "asin": "z", "rating": 3.0, "timestamp": 1300000000000}\n',
            {},
        ),
    ],
)
def test_amazon_reads_reviews_of_every_edition(tmp_path: Path, text: str, options: dict[str, object]) -> None:
    with gzip.open(tmp_path / "reviews.gz", "wt") as stream:
        stream.write(text)
    dataset = open_prepared("amazon_csv", tmp_path / "reviews.gz", **options)
    assert histories(dataset) == {"A1": ["B2", "B1"]}
    assert events(dataset, "timestamps_ms") == [1_300_000_000_000, 1_400_000_000_000]
    assert events(dataset, "event_rating") == [3.0, 5.0]


def test_amazon_quarantines_lines_that_are_not_json(tmp_path: Path) -> None:
    good = '{"reviewerID": "A1", "asin": "B1", "overall": 5.0, "unixReviewTime": 1400000000}\n'
    (tmp_path / "reviews.json").write_text(good + "{broken\n" + '{"asin": "B1", "overall": 1, "unixReviewTime": 1}\n')
    counts = open_prepared("amazon_csv", tmp_path / "reviews.json", max_bad_fraction=1.0).card.counts
    assert dict(counts.quarantined) == {"missing user": 1, "not a JSON object": 1}


KUAIRAND_COLUMNS = (
    "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view,"
    "play_time_ms,duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab\n"
)


def write_kuairand(folder: Path) -> Path:
    """Writes the layout of the 27K edition: two periods in parts, a random log, and features in parts."""
    data = folder / "KuaiRand-27K" / "data"
    data.mkdir(parents=True)
    rows = {
        "log_standard_4_08_to_4_21_27k_part1": "0,10,20220408,1200,3000,1,0,0,0,0,0,1,500,900,0,0,0,0,1\n",
        "log_standard_4_08_to_4_21_27k_part2": "0,11,20220408,1100,1000,0,1,1,1,1,1,0,7,0,1,2,1,0,4\n" * 2,
        "log_standard_4_22_to_5_08_27k_part1": "1,10,20220422,1200,9000,0,0,0,0,0,0,0,0,900,0,0,0,0,1\n",
        "log_standard_4_22_to_5_08_27k_part2": "0,12,20220422,1200,9000,1,0,0,0,0,0,0,8,900,0,0,0,0,1\n",
        "log_random_4_22_to_5_08_27k": "1,13,20220422,1200,8000,1,0,0,0,0,0,0,8,900,0,0,0,1,0\n",
    }
    for name, text in rows.items():
        (data / f"{name}.csv").write_text(KUAIRAND_COLUMNS + text)
    (data / "user_features_27k.csv").write_text(
        "user_id,user_active_degree,is_live_streamer,follow_user_num,follow_user_num_range,onehot_feat4\n"
        '1,full_active,-124,5,"(0,10]",\n0,high_active,1,600,500+,3\n7,day_new,1,1,"(0,10]",4\n'
    )
    (data / "video_features_basic_27k.csv").write_text(
        "video_id,author_id,video_type,upload_dt,upload_type,visible_status,video_duration,server_width,server_height,"
        "music_id,music_type,tag\n"
        '10,77,NORMAL,2022-04-05,Web,0,900.0,720,1280,9170000000,4.0,"12,65"\n12,78,AD,,Web,0,,720,1280,1,,\n'
    )
    (data / "video_features_statistic_27k_part1.csv").write_text("video_id,counts,show_cnt\n10,4,2.5\n")
    (data / "video_features_statistic_27k_part2.csv").write_text("video_id,counts,show_cnt\n12,5,3.5\n")
    return data.parent


def test_kuairand_merges_files_by_time_and_drops_duplicates(tmp_path: Path) -> None:
    dataset = open_prepared("kuairand", write_kuairand(tmp_path))
    assert histories(dataset) == {"0": ["11", "10", "12"], "1": ["10"]}
    assert dataset.card.counts.duplicates_dropped == 1
    assert events(dataset, "actions") == [2 | 4 | 8 | 16 | 32 | 128, 1 | 64, 1, 0]
    assert events(dataset, "event_play_time_ms") == [7, 500, 8, 0]
    assert events(dataset, "event_comment_stay_time") == [2, 0, 0, 0]
    tabs = [int(i) for i in events(dataset, "event_tab")]
    assert names(dataset, "event_tab", tabs) == ["4", "1", "1", "1"]


def test_kuairand_feature_vocabularies_have_an_unknown_row(tmp_path: Path) -> None:
    dataset = open_prepared("kuairand", write_kuairand(tmp_path))
    users = dataset.rows(np.array([0, 1])).scalars
    assert names(dataset, "user_active_degree", users["user_active_degree"].tolist()) == ["high_active", "full_active"]
    assert users["user_onehot_feat4"].tolist()[1] == 0
    assert users["user_follow_user_num"].tolist() == [600.0, 5.0]
    assert {f.name: f.vocabulary_size for f in dataset.card.user_features}["follow_user_num_range"] == 3
    video = item(dataset, "10")
    assert names(dataset, "item_tag", video["item_tag"]) == ["12", "65"]  # type: ignore[arg-type]
    assert video["item_upload_dt"] == 19087.0
    assert names(dataset, "item_music_id", [video["item_music_id"]]) == ["9170000000"]  # type: ignore[list-item]
    assert (item(dataset, "12")["item_music_type"], item(dataset, "12")["item_tag"]) == (0, [])
    assert item(dataset, "11")["item_author_id"] == 0
    assert not [f for f in dataset.card.item_features if f.name == "show_cnt"]


def test_side_table_first_of_repeated_keys_wins(tmp_path: Path) -> None:
    (tmp_path / "ratings.dat").write_text("1::2::5::978300760\n")
    (tmp_path / "movies.dat").write_text("2::First::Drama\n2::Second::War\n")
    assert item(open_prepared("movielens", tmp_path), "2")["item_title"] == "First"


def test_side_table_with_bad_rows_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "ratings.dat").write_text("1::2::5::978300760\n")
    (tmp_path / "movies.dat").write_text("2::First::Drama\n3::no genres\n")
    with pytest.raises(DataError, match=r"1 of 2 rows are bad.*movies\.dat, line 2"):
        open_prepared("movielens", tmp_path)


def test_kuairand_random_logs_and_statistics_are_optional(tmp_path: Path) -> None:
    dataset = open_prepared("kuairand", write_kuairand(tmp_path), random_logs=True, video_statistics=True)
    assert histories(dataset)["1"] == ["13", "10"]
    assert events(dataset, "actions")[-2] == 1 | 256
    assert (item(dataset, "10")["item_show_cnt"], item(dataset, "12")["item_counts"]) == (2.5, 5.0)


def test_criteo_rows_mark_missing_values_and_hash_by_column(tmp_path: Path) -> None:
    first = ["1", *["5"] * 12, "", *["aa"] * 25, ""]
    second = ["0", *["-1"] * 13, *["aa"] * 26]
    lines = [
        "\t".join(first),
        "\t".join(second),
        "\t".join(first),
        "\t".join(["2", *first[1:]]),
        "\t".join(["1", "x", *first[2:]]),
    ]
    (tmp_path / "train.txt").write_text("\n".join(lines) + "\n")
    dataset = open_prepared("criteo", tmp_path / "train.txt", max_bad_fraction=1.0)
    rows = dataset.rows(np.array([0, 1]))
    dense = rows.lists["dense"][0].reshape(2, 13)
    categories = rows.lists["categories"][0].reshape(2, 26)
    assert rows.scalars["label"].tolist() == [1, 0]
    assert dense[0, :12].tolist() == [5.0] * 12
    assert np.isnan(dense[0, 12])
    assert categories[0, 25] == 0
    assert np.unique(categories[1]).size == 26
    assert (categories[1] > 0).all()
    assert np.array_equal(categories[0, :25], categories[1, :25])
    counts = dataset.card.counts
    assert (counts.events, counts.duplicates_kept) == (3, 1)
    assert dict(counts.quarantined) == {"label is not 0 or 1": 1, "not a number": 1}
    assert dataset.lengths.tolist() == [1, 1, 1]
    with pytest.raises(UserError, match="duplicates"):
        open_prepared("criteo", tmp_path / "train.txt", duplicates="drop")


def test_log_folder_is_read_in_name_order(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "b.csv").write_text("user,item\nu,2\n")
    (tmp_path / "logs" / "a.csv").write_text("user,item\nu,1\n")
    (tmp_path / "logs" / "notes.md").write_text("not a log")
    assert histories(open_prepared("log", tmp_path / "logs")) == {"u": ["1", "2"]}


def test_log_actions_by_number_and_by_value(tmp_path: Path) -> None:
    (tmp_path / "log.tsv").write_text("u\ta\tbuy\t1\nu\tb\tview\t0\nu\tc\tbuy\t\n")
    log = LogColumns(
        column_names=("user", "item", "what", "liked"), separator="\\t", actions={"buy": "what=buy", "like": "liked"}
    )
    dataset = open_prepared("log", tmp_path / "log.tsv", log=log)
    assert events(dataset, "actions") == [3, 0, 1]


def test_amazon_lone_surrogate_is_a_bad_row(tmp_path: Path) -> None:
    review = '{"reviewerID": "%s", "asin": "B1", "overall": 5.0, "unixReviewTime": 1400000000}\n'
    (tmp_path / "reviews.json").write_text(review % "ann" + review % r"\ud800" + review % "bob")
    card = prepare("amazon_csv", tmp_path / "reviews.json", tmp_path / "out", max_bad_fraction=1)
    assert (card.counts.users, card.counts.quarantined) == (2, {"not a JSON object": 1})
