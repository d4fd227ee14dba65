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
    """Checks that elements close in order and notes what they hold."""

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


def test_the_page_is_one_file_that_loads_nothing(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    before = set(folder.iterdir())
    path = write_report(folder)
    assert set(folder.iterdir()) - before == {path}
    page = outline(path)
    assert {"script", "link", "img", "iframe", "object"}.isdisjoint(page.tags)
    assert {"src", "href", "xlink:href", "srcset", "action"}.isdisjoint(name for name, _ in page.attributes)
    assert re.search(r"https?://|url\(|@import", path.read_text()) is None
    assert path.stat().st_size < 500_000


def test_the_page_shows_numbers_curves_and_surroundings(tmp_path: Path) -> None:
    page = outline(write_report(write_run(tmp_path / "run")))
    test = make_records(12)[-1]["metrics"]
    mean, low, high = test["model"]["ndcg@10"]
    assert f"{mean:.4f}" in page.text
    assert f"[{low:.4f}, {high:.4f}]" in page.text
    assert f"model over last item, its best baseline{mean / 0.0874:.2f}x" in page.text
    for words in ("popularity", "last item", "Training loss", "ndcg@10 (valid)", "Samples a second", "gradients"):
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
    assert "damaged" not in page.text


def test_the_page_says_loudly_that_a_model_does_not_beat_its_best_baseline(tmp_path: Path) -> None:
    won = outline(write_report(write_run(tmp_path / "won")))
    assert "BASELINE" not in won.text
    folder = write_run(tmp_path / "lost", num_epochs=1, with_test=False)
    lost = outline(write_report(folder))
    assert "THE MODEL DOES NOT BEAT ITS BEST BASELINE: ndcg@10 0.0420 against 0.0874 of 'last item'" in lost.text
    assert "BEHIND" in lost.text
    assert "over popularity" not in lost.text, "no factor over a weaker baseline"


def test_the_page_shows_slices(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    of_new = {"model": {"ndcg@10": [0.1234, 0.0, 0.2]}, "popularity": {"ndcg@10": [0.0, 0.0, 0.0]}}
    with_slices = {**make_records(12)[-1], "slices": {"new items": {"count": 12, "metrics": of_new}}, "step": 10**6}
    append(folder, json.dumps(with_slices) + "\n")
    page = outline(write_report(folder))
    assert "new items12ndcg@100.12340.0000" in page.text


def test_before_the_test_the_best_validation_result_leads(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_epochs=3, with_test=False)
    worse = make_records(1)[-2] | {"step": 500, "epoch": 4}
    append(folder, json.dumps(worse) + "\n")
    page = outline(write_report(folder))
    best = make_records(3, with_test=False)[-1]["metrics"]["model"]["ndcg@10"][0]
    assert f"model, ndcg@10 (valid){best:.4f}" in page.text


@pytest.mark.parametrize("num_epochs", [0, 1])
def test_a_young_run_has_a_page(tmp_path: Path, num_epochs: int) -> None:
    folder = write_run(tmp_path / "run", num_epochs=num_epochs, with_test=False, with_trace=False)
    page = outline(write_report(folder))
    assert ("No evaluation yet" in page.text) == (num_epochs == 0)
    assert "Timeline" not in page.text


def test_a_run_that_has_only_its_config_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"name": "lonely"}')
    page = outline(write_report(tmp_path))
    assert "lonely" in page.text
    assert "not started" in page.text


def test_a_folder_without_a_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run folder"):
        write_report(tmp_path)
    with pytest.raises(UserError, match="not a run folder"):
        write_report(tmp_path / "absent")
    assert list(tmp_path.iterdir()) == []


def test_damaged_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_epochs=2, with_test=False)
    append(folder, '{"kind": "step", "step": 81, "lo{"kind": "step", "step": 82}\n[1]\n{"kind": "step", "step": "x"}\n')
    append(
        folder, '{"kind": "evaluation", "step": 83, "part": "valid", "metrics": {}}\n{"kind": "step", "step": 84, "lo'
    )
    page = outline(write_report(folder))
    assert "5 damaged lines of metrics.jsonl skipped" in page.text
    assert "step 80, epoch 2" in page.text


def test_repeated_steps_of_a_resumed_run_count_once(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_epochs=1, with_test=False, with_trace=False)
    append(folder, json.dumps(make_records(1)[0] | {"loss": 1.0}) + "\n")
    assert "Mean of 39 records" in outline(write_report(folder)).text


@pytest.mark.parametrize("name", ["config.json", "versions.json", "card.json", "trace.jsonl"])
@pytest.mark.parametrize("content", ["{\n", "[]\n", "null\n{}\n", '{"id": 1}\nx\n'])
def test_a_damaged_file_costs_its_section_only(tmp_path: Path, name: str, content: str) -> None:
    folder = write_run(tmp_path / "run", num_epochs=2)
    (folder / name).write_text(content)
    page = outline(write_report(folder))
    assert "0.0312" in page.text
    assert "damaged" in page.text


@pytest.mark.parametrize("value", ["text", 3, [], {"edges": "abc", "counts": [1]}, {"edges": [0, 1], "counts": [1]}])
def test_a_card_with_odd_values_does_not_stop_the_page(tmp_path: Path, value: Any) -> None:
    folder = write_run(tmp_path / "run", num_epochs=1)
    edit(folder / "card.json", length_histogram=value, counts=value)
    assert "Training loss" in outline(write_report(folder)).text


def test_values_that_are_not_finite_leave_gaps(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_epochs=1, with_test=False, with_trace=False)
    record = make_records(1)[0]
    lines = [json.dumps(record | {"step": step, "loss": float("nan"), "memory_mib": None}) for step in range(41, 45)]
    append(folder, "\n".join(lines) + "\n")
    text = write_report(folder).read_text()
    assert re.search(r'(points|c?[xy]|width|height)="[^"]*(nan|inf)', text) is None


def test_hostile_names_are_shown_as_text(tmp_path: Path) -> None:
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


def test_a_long_run_has_a_small_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_epochs=250)
    path = write_report(folder)
    assert path.stat().st_size < 1_500_000


def test_the_page_is_named_after_the_run_and_names_its_recipe(tmp_path: Path) -> None:
    page = outline(write_report(write_run(tmp_path / "mine-2")))
    assert "mine-2 · nestrec" in page.text
    assert "recipe ml_1m_hstu" in page.text


def test_the_page_shows_parameters_and_what_filters_removed(tmp_path: Path) -> None:
    text = outline(write_report(write_run(tmp_path / "run"))).text
    assert "dense parameters12,345" in text
    assert "parameters in tables185,350" in text
    assert "3,707 rows of 50" in text
    assert "Events removed by filtersmin rating345" in text
    assert "Bad rows set asidemissing id12" in text


def test_words_of_time_are_defined_where_they_are_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    balanced = {"steps": [1, 2], "imbalance": [0.1, 0.2], "straggler": [0.1, 0.1]}
    append(folder, json.dumps({"kind": "step", "step": 999, "epoch": 12, "loss": 1.0, "balance": balanced}) + "\n")
    text = outline(write_report(folder)).text
    for word in ("Exposed: ", "Idle: ", "Wait (in the lanes): ", "Waiting at collectives: "):
        assert word in text


def colour_of(page: str, label: str, heading: str) -> str:
    """The colour of a part in the first table after a heading."""
    found = re.search(rf'<i class="swatch (b\d+)"></i>{label}<', page[page.index(heading) :])
    assert found is not None
    return found[1]


def test_a_colour_means_one_thing_in_all_charts_of_time(tmp_path: Path) -> None:
    page = write_report(write_run(tmp_path / "run")).read_text()
    first, second = "Where a step&#x27;s time goes", "<h2>Timeline"
    assert colour_of(page, "compute", first) == colour_of(page, "compute", second)
    of_kinds = {colour_of(page, f"exposed {kind}", second) for kind in ("communication", "lookup")}
    parts = ("data", "route", "fetch", "vectors", "gradients", "update")
    of_parts = [colour_of(page, name, first) for name in (*parts, "compute")]
    assert len(set(of_parts)) == len(of_parts)
    assert of_kinds.isdisjoint(of_parts)


def test_no_table_breaks_words_or_numbers_inside() -> None:
    rules = dict(re.findall(r"^(\.[\w .>:+-]+?) \{([^}]*)\}", STYLE, re.M))
    assert "anywhere" not in rules[".numbers td"]
    assert "nowrap" in rules[".facts td:first-child"]
    assert "nowrap" in rules[".measures td + td"]
    of_results = re.search(r"^\.results th, \.results td \{([^}]*)\}", STYLE, re.M)
    assert of_results is not None
    assert "nowrap" in of_results[1], "figures of a plan as well"
