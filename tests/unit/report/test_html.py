import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from nestrec.base.errors import UserError
from nestrec.report import write_report
from nestrec.report.markup import STYLE
from support.example_run import make_records, write_run

HOSTILE = "<script>alert('x')</script>\"&"
VOID = {"meta", "br"}


class Outline(HTMLParser):
    """Parser that checks that elements close in order, and records tags, attributes and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def outline(path: Path) -> Outline:
    parser = Outline()
    parser.feed(path.read_text(encoding="utf-8"))
    parser.close()
    assert parser.open == []
    return parser


def append(folder: Path, text: str) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(text)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_run_page_is_self_contained(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    before = set(folder.iterdir())
    path = write_report(folder)
    assert set(folder.iterdir()) - before == {path}
    page = outline(path)
    assert {"script", "link", "img", "iframe", "object"}.isdisjoint(page.tags)
    assert {"src", "href", "xlink:href", "srcset", "action"}.isdisjoint(name for name, _ in page.attributes)
    assert re.search(r"https?://|url\(|@import", path.read_text()) is None
    assert path.stat().st_size < 500_000


def test_run_page_shows_metrics_curves_and_environment(tmp_path: Path) -> None:
    page = outline(write_report(write_run(tmp_path / "run")))
    test = make_records(12)[-1]["metrics"]
    mean, low, high = test["model"]["ndcg@10"]
    assert f"{mean:.4f}" in page.text
    assert f"[{low:.4f}, {high:.4f}]" in page.text
    assert f"model over last item, the best baseline{mean / 0.0874:.2f}x" in page.text
    for words in ("popularity", "last item", "Training loss", "ndcg@10 (valid)", "Samples per second", "gradients"):
        assert words in page.text
    for words in (
        "Users by number of events",
        "Items by number of events",
        "exposed communication",
        "rank 1 · exchange",
    ):
        assert words in page.text
    for words in ("resumed from step 200", "2.13.0+cpu", "nestrec train ml_1m_hstu", '"num_layers": 2'):
        assert words in page.text
    assert "corrupt" not in page.text


def test_run_page_warns_if_baseline_wins(tmp_path: Path) -> None:
    won = outline(write_report(write_run(tmp_path / "won")))
    assert "BASELINE" not in won.text
    folder = write_run(tmp_path / "lost", num_epochs=1, with_test=False)
    lost = outline(write_report(folder))
    assert "THE MODEL DOES NOT BEAT ITS BEST BASELINE: ndcg@10 0.0420 against 0.0874 of 'last item'" in lost.text
    assert "BEHIND" in lost.text
    assert "over popularity" not in lost.text, "the ratio to a weaker baseline must not be shown"


def test_run_page_shows_slices(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    metrics = {"model": {"ndcg@10": [0.1234, 0.0, 0.2]}, "popularity": {"ndcg@10": [0.0, 0.0, 0.0]}}
    with_slices = {**make_records(12)[-1], "slices": {"new items": {"count": 12, "metrics": metrics}}, "step": 10**6}
    append(folder, json.dumps(with_slices) + "\n")
    page = outline(write_report(folder))
    assert "new items12ndcg@100.12340.0000" in page.text


def test_run_page_without_test_shows_best_validation(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_epochs=3, with_test=False)
    worse = make_records(1)[-2] | {"step": 500, "epoch": 4}
    append(folder, json.dumps(worse) + "\n")
    page = outline(write_report(folder))
    best = make_records(3, with_test=False)[-1]["metrics"]["model"]["ndcg@10"][0]
    assert f"model, ndcg@10 (valid){best:.4f}" in page.text


@pytest.mark.parametrize("num_epochs", [0, 1])
def test_run_page_of_new_run(tmp_path: Path, num_epochs: int) -> None:
    folder = write_run(tmp_path / "run", num_epochs=num_epochs, with_test=False, with_trace=False)
    page = outline(write_report(folder))
    assert ("No evaluation yet" in page.text) == (num_epochs == 0)
    assert "Timeline" not in page.text


def test_run_page_of_run_with_config_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"name": "lonely"}')
    page = outline(write_report(tmp_path))
    assert "lonely" in page.text
    assert "not started" in page.text


def test_run_page_rejects_folder_without_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run folder"):
        write_report(tmp_path)
    with pytest.raises(UserError, match="not a run folder"):
        write_report(tmp_path / "absent")
    assert list(tmp_path.iterdir()) == []


def test_run_page_skips_and_counts_damaged_lines(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_epochs=2, with_test=False)
    append(folder, '{"kind": "step", "step": 81, "lo{"kind": "step", "step": 82}\n[1]\n{"kind": "step", "step": "x"}\n')
    append(
        folder, '{"kind": "evaluation", "step": 83, "part": "valid", "metrics": {}}\n{"kind": "step", "step": 84, "lo'
    )
    page = outline(write_report(folder))
    assert "skipped 5 corrupt lines of metrics.jsonl" in page.text
    assert "step 80, epoch 2" in page.text


def test_run_page_counts_repeated_steps_once(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_epochs=1, with_test=False, with_trace=False)
    append(folder, json.dumps(make_records(1)[0] | {"loss": 1.0}) + "\n")
    assert "Mean of 39 records" in outline(write_report(folder)).text


@pytest.mark.parametrize("name", ["config.json", "versions.json", "card.json", "trace.jsonl"])
@pytest.mark.parametrize("content", ["{\n", "[]\n", "null\n{}\n", '{"id": 1}\nx\n'])
def test_run_page_skips_section_of_corrupt_file(tmp_path: Path, name: str, content: str) -> None:
    folder = write_run(tmp_path / "run", num_epochs=2)
    (folder / name).write_text(content)
    page = outline(write_report(folder))
    assert "0.0312" in page.text
    assert "corrupt" in page.text


@pytest.mark.parametrize("value", ["text", 3, [], {"edges": "abc", "counts": [1]}, {"edges": [0, 1], "counts": [1]}])
def test_run_page_accepts_card_with_odd_values(tmp_path: Path, value: Any) -> None:
    folder = write_run(tmp_path / "run", num_epochs=1)
    edit(folder / "card.json", length_histogram=value, counts=value)
    assert "Training loss" in outline(write_report(folder)).text


def test_run_page_nonfinite_values_leave_gaps(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_epochs=1, with_test=False, with_trace=False)
    record = make_records(1)[0]
    lines = [json.dumps(record | {"step": step, "loss": float("nan"), "memory_mib": None}) for step in range(41, 45)]
    append(folder, "\n".join(lines) + "\n")
    text = write_report(folder).read_text()
    assert re.search(r'(points|c?[xy]|width|height)="[^"]*(nan|inf)', text) is None


def test_run_page_escapes_names(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_epochs=1)
    for name in ("config.json", "versions.json", "card.json"):
        edit(folder / name, name=HOSTILE, device=HOSTILE, command=HOSTILE, **{HOSTILE: HOSTILE})
    evaluation = make_records(1)[-1] | {"step": 50}
    evaluation["metrics"][HOSTILE] = {HOSTILE: [0.1, 0.0, 0.2], "ndcg@10": [0.1, 0.0, 0.2]}
    step = make_records(1)[0] | {"step": 41, "parts": {HOSTILE: 5.0}}
    event = {"kind": "event", "step": 42, "text": HOSTILE}
    append(folder, "".join(json.dumps(record) + "\n" for record in (evaluation, step, event)))
    page = outline(write_report(folder))
    assert "script" not in page.tags
    assert page.text.count("<script>alert") > 8


def test_run_page_of_long_run_is_small(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_epochs=250)
    path = write_report(folder)
    assert path.stat().st_size < 1_500_000


def test_run_page_title_names_run_and_recipe(tmp_path: Path) -> None:
    page = outline(write_report(write_run(tmp_path / "mine-2")))
    assert "mine-2 · nestrec" in page.text
    assert "recipe ml_1m_hstu" in page.text


def test_run_page_shows_parameters_and_filters(tmp_path: Path) -> None:
    text = outline(write_report(write_run(tmp_path / "run"))).text
    assert "dense parameters12,345" in text
    assert "parameters in tables185,350" in text
    assert "3,707 rows of 50" in text
    assert "Events removed by filtersmin rating345" in text
    assert "Quarantined rowsmissing id12" in text


def test_run_page_defines_time_terms(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    balanced = {"steps": [1, 2], "imbalance": [0.1, 0.2], "straggler": [0.1, 0.1]}
    append(folder, json.dumps({"kind": "step", "step": 999, "epoch": 12, "loss": 1.0, "balance": balanced}) + "\n")
    text = outline(write_report(folder)).text
    for word in ("Exposed: ", "Idle: ", "Wait (in the lanes): ", "Waiting at collectives: "):
        assert word in text


def color_of(page: str, label: str, heading: str) -> str:
    """Return the color of a part in the first table after a heading."""
    found = re.search(rf'<i class="swatch (b\d+)"></i>{label}<', page[page.index(heading) :])
    assert found is not None
    return found[1]


def test_run_page_time_charts_share_colors(tmp_path: Path) -> None:
    page = write_report(write_run(tmp_path / "run")).read_text()
    first, second = "Breakdown of the step time", "<h2>Timeline"
    assert color_of(page, "compute", first) == color_of(page, "compute", second)
    exposed_colors = {color_of(page, f"exposed {kind}", second) for kind in ("communication", "lookup")}
    parts = ("data", "route", "fetch", "vectors", "gradients", "update")
    part_colors = [color_of(page, name, first) for name in (*parts, "compute")]
    assert len(set(part_colors)) == len(part_colors)
    assert exposed_colors.isdisjoint(part_colors)


def test_run_page_tables_do_not_break_words() -> None:
    rules = dict(re.findall(r"^(\.[\w .>:+-]+?) \{([^}]*)\}", STYLE, re.M))
    assert "anywhere" not in rules[".numbers td"]
    assert "nowrap" in rules[".facts td:first-child"]
    assert "nowrap" in rules[".measures td + td"]
    results_rule = re.search(r"^\.results th, \.results td \{([^}]*)\}", STYLE, re.M)
    assert results_rule is not None
    assert "nowrap" in results_rule[1], "numbers of plan tables must not wrap"
