"""The tutorial notebooks run completely on small synthetic data in the file formats of the original datasets.

A notebook reads its datasets from the folder NESTREC_TUTORIAL_DATA, and limits its training to
NESTREC_TUTORIAL_EPOCHS epochs; its commands are `%%bash` cells, which fail if a command fails.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import nbformat
import numpy as np
import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


def load_run_tutorials() -> ModuleType:
    """Import docs/run_tutorials.py, which is not part of a package."""
    spec = importlib.util.spec_from_file_location("run_tutorials", DOCS / "run_tutorials.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


run_tutorials = load_run_tutorials()


def write_movielens(folder: Path, num_users: int = 150, num_items: int = 450) -> None:
    """Write MovieLens 100K files (`ml-100k/u.data`, `u.item`, `u.user`) with random ratings."""
    rng = np.random.default_rng(0)
    root = folder / "ml-100k"
    root.mkdir(parents=True)
    ratings, users, items = [], [], []
    for user in range(1, num_users + 1):
        times = np.sort(rng.integers(874_724_710, 893_286_638, 20))
        chosen = rng.choice(num_items, 20, replace=False) + 1
        stars = rng.integers(1, 6, 20)
        rows = zip(chosen, stars, times, strict=True)
        ratings += [f"{user}\t{item}\t{rating}\t{time}" for item, rating, time in rows]
        users.append(f"{user}|{20 + user % 50}|{'MF'[user % 2]}|student|{10000 + user}")
    for item in range(1, num_items + 1):
        flags = "|".join(str(int(genre in (item % 19, item % 7))) for genre in range(19))
        items.append(f"{item}|Movie {item} (1995)|01-Jan-1995||http://example.com/|{flags}")
    rng.shuffle(ratings)  # the original file is not sorted either
    (root / "u.data").write_text("\n".join(ratings) + "\n")
    (root / "u.item").write_text("\n".join(items) + "\n", encoding="latin-1")
    (root / "u.user").write_text("\n".join(users) + "\n")


def write_movielens_stream(folder: Path, num_users: int = 240, num_items: int = 450) -> None:
    """Write `ml-100k/u.data` with random ratings; movie 313 does not appear before 21 December 1997."""
    rng = np.random.default_rng(0)
    others = np.delete(np.arange(1, num_items + 1), 312)
    ratings = []
    for user in range(1, num_users + 1):
        times = np.sort(rng.integers(874_724_710, 893_286_638, 50))
        chosen = rng.choice(others, 50, replace=False)
        chosen[np.flatnonzero(times >= 882_662_400)[:1]] = 313
        ratings += [f"{user}\t{item}\t{1 + item % 5}\t{time}" for item, time in zip(chosen, times, strict=True)]
    rng.shuffle(ratings)
    (folder / "ml-100k").mkdir(parents=True)
    (folder / "ml-100k" / "u.data").write_text("\n".join(ratings) + "\n")


def write_kuairand(folder: Path, num_users: int = 200, num_videos: int = 60) -> None:
    """Write KuaiRand-Pure files with random impressions of 25 to 30 April 2022, and of one day before."""
    rng = np.random.default_rng(0)
    root = folder / "KuaiRand-Pure" / "data"
    root.mkdir(parents=True)
    signals = ("click", "like", "follow", "comment", "forward", "hate")
    header = (
        "user_id,video_id,date,hourmin,time_ms," + "".join(f"is_{signal}," for signal in signals) + "long_view,"
        "play_time_ms,duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab"
    )
    log = [header]
    start_ms, day_ms = 1_650_729_600_000, 86_400_000  # 24 April 2022 in Beijing
    for time_ms in np.sort(rng.integers(start_ms, start_ms + 7 * day_ms, 14 * num_users)):
        day = 20220424 + int(time_ms - start_ms) // day_ms
        video = int(rng.integers(num_videos))
        click = int(rng.random() < 0.2 + 0.5 * video / num_videos)
        reactions = f"{click},{int(rng.random() < 0.1)},0,0,0,0,{click * int(rng.random() < 0.7)}"
        log.append(f"{rng.integers(num_users)},{video},{day},0,{time_ms},{reactions},{5000 * click},20000,0,0,0,0,1")
    (root / "log_standard_4_22_to_5_08_pure.csv").write_text("\n".join(log) + "\n")
    names = (
        "user_active_degree,is_lowactive_period,is_live_streamer,is_video_author,follow_user_num,follow_user_num_range,"
        "fans_user_num,fans_user_num_range,friend_user_num,friend_user_num_range,register_days,register_days_range"
    )
    users = [f"user_id,{names}," + ",".join(f"onehot_feat{k}" for k in range(18))]
    for user in range(num_users):
        flags = ",".join(str(user % (k + 2)) for k in range(18))
        degree = ("full_active", "high_active")[user % 2]
        users.append(f"{user},{degree},0,1,{user % 2},{user},500+,{user},0,{user},0,{100 + user},730+,{flags}")
    (root / "user_features_pure.csv").write_text("\n".join(users) + "\n")
    videos = [
        "video_id,author_id,video_type,upload_dt,upload_type,visible_status,video_duration,server_width,server_height,"
        "music_id,music_type,tag"
    ]
    for video in range(num_videos):
        kind = ("NORMAL", "AD")[video % 2]
        upload = ("Web", "Kmovie")[video % 2]
        size = f"{9000 + video}.0,720.0,1280.0"
        tags = f'"{video % 5},{video % 7}"'
        videos.append(f"{video},{video % 20},{kind},2022-04-10,{upload},0.0,{size},{video % 30},{video % 3}.0,{tags}")
    (root / "video_features_basic_pure.csv").write_text("\n".join(videos) + "\n")


@dataclass(frozen=True)
class Tutorial:
    """A notebook with its synthetic data."""

    name: str
    write_data: Callable[[Path], None]
    expected: tuple[str, ...] = ()
    """Texts that the outputs contain."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables that reduce the work of the notebook."""


TUTORIALS = [
    Tutorial("movielens", write_movielens, ("150 users", "test split", "NDCG@10 of the model minus", "share a genre")),
    Tutorial("kuairand", write_kuairand, ("200 users", "GAUC of click", "mean prediction over observed", '"scores"')),
    Tutorial("cascade", write_movielens, ("511 events", "nestrec_rank_requests_total", "exit code: 0")),
    Tutorial("fresh-data", write_movielens_stream, ("2 windows", "@00000001-", "versions_behind", "exit code: 0")),
]


@pytest.mark.timeout(300)  # below 40 s alone, more if other tests run at the same time
@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda tutorial: tutorial.name)
def test_tutorial_notebook_runs_on_synthetic_data(tutorial: Tutorial, tmp_path: Path) -> None:
    data = tmp_path / "datasets"
    tutorial.write_data(data)
    folder = tmp_path / "work"
    folder.mkdir()
    notebook = nbformat.read(DOCS / "tutorials" / f"{tutorial.name}.ipynb", as_version=4)
    env = {"NESTREC_TUTORIAL_DATA": str(data), "NESTREC_TUTORIAL_EPOCHS": "1", **tutorial.env}
    run_tutorials.execute(notebook, folder, env)
    run_tutorials.clean(notebook, {f"{tmp_path}/": ""})
    text = "\n".join(
        output.get("text", "") for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    )
    for expected in tutorial.expected:
        assert expected in text
    assert str(tmp_path) not in text
    assert "Warning:" not in text


@pytest.mark.parametrize("path", sorted((DOCS / "tutorials").glob("*.ipynb")), ids=lambda path: path.stem)
def test_tutorial_is_tested_and_has_outputs(path: Path) -> None:
    assert path.stem in {tutorial.name for tutorial in TUTORIALS}
    notebook = nbformat.read(path, as_version=4)
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert outputs, "execute it with docs/run_tutorials.py"
    assert not [output for output in outputs if output.output_type == "error"]


def test_clean_text_removes_machine_specific_parts() -> None:
    text = (
        "epoch 1/2  step 20/118  loss 7.2  106 samples/s  9.22k tokens/s  567 MiB  ETA 15s\n"
        "prepare data/x: done in 7s\n"
        "\x1b[1mvalid after epoch 1\x1b[0m, ndcg@10: model 0.0461\n"
        "trained to step 118 in 54.0 s; run folder: /some/folder/runs/x\n"
    )
    expected = "valid after epoch 1, ndcg@10: model 0.0461\ntrained to step 118; run folder: runs/x\n"
    assert run_tutorials.clean_text(text, {"/some/folder/": ""}) == expected
