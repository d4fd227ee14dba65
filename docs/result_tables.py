"""Writes the tables of pages anew from the result files that they name: `make results`.

    <!-- table overload.json: load, rate, goodput, p99_ms where load=2x|5x -->
    ... replaced by the rows ...
    <!-- /table -->

Files are looked for in `results/`; `FILE.json#summary` takes another list of the file than its `rows`,
or one row. Columns:

    of_peak as of peak           another label
    parts.attention.ms           a value inside a value
    step_ms + step_ms_spread     several values in a cell, with a space, ` ± ` or ` / ` between them
    impl, tflops by lengths      the last column is spread: one column for each value of `lengths`

Rows are chosen by `where a=x|y and b!=z`; what a row lacks is `None`. Below a table stand command, date and machine of
every run that gave a row of it.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
BLOCK = re.compile(r"(<!-- table (\S+?): (.*?) -->\n)(.*?)(<!-- /table -->)", re.DOTALL)
WRITTEN_TO = re.compile(r" --(json|page) \S+")
BETWEEN_NAMES = re.compile(r" ([+±/]) ")
BETWEEN = {"+": " ", "±": " ± ", "/": " / "}


def rewritten(text: str) -> str:
    """A page with its tables as the result files have them now."""
    return BLOCK.sub(lambda found: found[1] + _table(found[2], " ".join(found[3].split())) + found[5], text)


def _table(source: str, wanted: str) -> str:
    file, _, part = source.partition("#")
    frame = json.loads((DOCS / "results" / file).read_text())
    wanted, _, condition = wanted.partition(" where ")
    if spread := re.fullmatch(r"(.*) by (\w+)", wanted):
        wanted = spread[1]
    found = frame[part or "rows"]
    rows = [row for row in (found if isinstance(found, list) else [found]) if _is_chosen(row, condition)]
    if not rows:
        raise ValueError(f"no row of {file} has {condition}")
    columns = [tuple(words.strip().partition(" as ")[::2]) for words in wanted.split(",")]
    head = [label or re.split(BETWEEN_NAMES, name)[0] for name, label in columns]
    body = [[_cell(row, name) for name, _ in columns] for row in rows]
    if spread:
        head, body = _spread(head, body, [_text(_value(row, spread[2])) for row in rows])
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(["| " + " | ".join(cells) + " |" for cells in lines] + ["", _origin(frame, rows), ""])


def _spread(head: list[str], body: list[list[str]], across: list[str]) -> tuple[list[str], list[list[str]]]:
    """One line for each beginning, with the last cells side by side."""
    names = list(dict.fromkeys(across))
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for (*first, last), name in zip(body, across, strict=True):
        if name in (line := lines.setdefault(tuple(first), {})):
            raise ValueError(f"two rows have {first} and {name}")
        line[name] = last
    return [*head[:-1], *names], [[*first, *(line.get(name, "") for name in names)] for first, line in lines.items()]


def _is_chosen(row: dict[str, Any], condition: str) -> bool:
    for part in condition.split(" and ") if condition else []:
        name, operator, values = re.split(r"(!?=)", part, maxsplit=1)
        if (str(_value(row, name.strip())) in values.strip().split("|")) != (operator == "="):
            return False
    return True


def _cell(row: dict[str, Any], names: str) -> str:
    first, *others = re.split(BETWEEN_NAMES, names)
    text = _text(_value(row, first))
    for sign, name in zip(others[::2], others[1::2], strict=True):
        if (value := _value(row, name)) is not None:
            text += BETWEEN[sign] + _text(value)
    return text


def _value(row: dict[str, Any], name: str) -> Any:
    if name in row or "." not in name:
        return row.get(name)
    outer, _, inner = name.partition(".")
    return _value(row.get(outer) or {}, inner)


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "", True: "yes", False: "no"}[value]
    if isinstance(value, list):
        texts = ", ".join(_text(one) for one in value)
        return f"[{texts}]" if any(isinstance(one, float) for one in value) else texts
    if isinstance(value, float):
        decimals = 4 if abs(value) < 1 else max(0, 4 - len(str(int(abs(value)))))
        text = f"{value:,.{decimals}f}"
        return (text.rstrip("0").rstrip(".") if decimals else text) if float(text.replace(",", "")) else f"{value:.2g}"
    return f"{value:,}" if type(value) is int else str(value)


def _origin(frame: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Where figures come from: command (less where it wrote to), date, machine."""
    numbers = {row["run"] for row in rows if "run" in row}
    runs = [run for number, run in enumerate(frame.get("runs", [frame])) if not numbers or number in numbers]
    return "; ".join(_run(run) for run in runs)


def _run(run: dict[str, Any]) -> str:
    hardware = run["hardware"]
    devices = hardware.get("gpus") or [hardware.get("device") or hardware["cpu"]]
    words = [f"`{WRITTEN_TO.sub('', run['command'])}`", f"{run['date'][:16].replace('T', ' ')} UTC", *devices]
    return ", ".join([*words, f"{hardware['cores']} cores", *([run["note"]] if "note" in run else [])])


if __name__ == "__main__":
    pages = [Path(name) for name in sys.argv[1:]] or [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]
    for page in pages:
        text = page.read_text()
        if (new := rewritten(text)) != text:
            page.write_text(new)
            print(f"written anew: {page.relative_to(DOCS.parent)}")
