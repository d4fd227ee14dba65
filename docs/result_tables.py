"""Updates the tables of pages from the result files that they name (`make results`).

    <!-- table overload.json: load, rate, goodput, p99_ms where load=2x|5x -->
    ... replaced by the rows ...
    <!-- /table -->

Result files are read from `results/`. `FILE.json#summary` uses the list or the single row in the field `summary` of the
file instead of `rows`. Columns:

    of_peak as of peak           column with a different label
    parts.attention.ms           nested field
    step_ms + step_ms_spread     several values in a cell, separated by a space, ` ± ` or ` / `
    impl, tflops by lengths      pivot table: the last column becomes one column per value of `lengths`

Rows are selected by `where a=x|y and b!=z`; a missing value is `None`. The text below a table contains
the command, date and machine of every run with a row in it, in a collapsed block if it is long. The markers may be
indented, for tables inside of collapsed blocks; the generated lines are then indented equally.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
BLOCK = re.compile(r"^( *)(<!-- table (\S+?): (.*?) -->\n)(.*?)^ *(<!-- /table -->)", re.DOTALL | re.MULTILINE)
WRITTEN_TO = re.compile(r" --(json|page) \S+")
OPERATOR = re.compile(r" ([+±/]) ")
CURRENT_TERMS = {
    "anew": "retrained",
    "followed": "online",
    "rolling swaps behind gateway": "gateway",
    "rolling swaps behind ray": "Ray Serve",
    "store under kill": "killed",
    "store under pause": "paused",
    "store under full": "full",
    "auto, items of the input barred": "auto, protocol of the recipe",
    "last item, items of the input barred": "last item, protocol of the recipe",
    "a version doubled in another's place": "a version copied over another",
    "ended by its time limit behind these rows": "ended by its time limit after these rows",
}
"""Texts of result files, which are records and are not rewritten, and the current terms for them."""
SHORT = 120
"""Largest length of an origin that is not collapsed."""
SEPARATORS = {"+": " ", "±": " ± ", "/": " / "}


def rewritten(text: str) -> str:
    """Return the page with up-to-date tables."""
    return BLOCK.sub(_block, text)


def _block(match: re.Match[str]) -> str:
    indent, marker, source, query, _, end = match.groups()
    lines = _table(source, " ".join(query.split()))
    if indent:
        lines = ["", *lines, ""]  # without blank lines, Markdown does not find a table between indented comments
    return indent + marker + "".join(f"{indent}{line}".rstrip() + "\n" for line in lines) + indent + end


def _table(source: str, query: str) -> list[str]:
    file, _, part = source.partition("#")
    frame = json.loads((DOCS / "results" / file).read_text())
    query, _, condition = query.partition(" where ")
    if pivot := re.fullmatch(r"(.*) by (\w+)", query):
        query = pivot[1]
    content = frame[part or "rows"]
    rows = [row for row in (content if isinstance(content, list) else [content]) if _is_selected(row, condition)]
    if not rows:
        raise ValueError(f"no row of {file} has {condition}")
    columns = [tuple(words.strip().partition(" as ")[::2]) for words in query.split(",")]
    head = [label or re.split(OPERATOR, name)[0] for name, label in columns]
    body = [[_cell(row, name) for name, _ in columns] for row in rows]
    if pivot:
        head, body = _pivot(head, body, [_text(_value(row, pivot[2])) for row in rows])
    lines = ["| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *body]]
    return [*lines, "", *_origin(frame, rows)]


def _pivot(head: list[str], body: list[list[str]], keys: list[str]) -> tuple[list[str], list[list[str]]]:
    """Merge the rows that differ in their last cell only; the last cells become columns."""
    names = list(dict.fromkeys(keys))
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for (*first, last), name in zip(body, keys, strict=True):
        if name in (line := lines.setdefault(tuple(first), {})):
            raise ValueError(f"two rows have {first} and {name}")
        line[name] = last
    return [*head[:-1], *names], [[*first, *(line.get(name, "") for name in names)] for first, line in lines.items()]


def _is_selected(row: dict[str, Any], condition: str) -> bool:
    for part in condition.split(" and ") if condition else []:
        name, operator, values = re.split(r"(!?=)", part, maxsplit=1)
        if (str(_value(row, name.strip())) in values.strip().split("|")) != (operator == "="):
            return False
    return True


def _cell(row: dict[str, Any], names: str) -> str:
    first, *others = re.split(OPERATOR, names)
    text = _text(_value(row, first))
    for sign, name in zip(others[::2], others[1::2], strict=True):
        if (value := _value(row, name)) is not None:
            text += SEPARATORS[sign] + _text(value)
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
        if not float(text.replace(",", "")):
            return f"{value:.2g}"
        return text.rstrip("0").rstrip(".") if decimals else text
    return f"{value:,}" if type(value) is int else CURRENT_TERMS.get(value, str(value))


def _origin(frame: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """Return the commands of the runs, without output files, in a collapsed block if they are long."""
    numbers = {row["run"] for row in rows if "run" in row}
    runs = [run for number, run in enumerate(frame.get("runs", [frame])) if not numbers or number in numbers]
    machines = dict.fromkeys(_machine(run["hardware"]) for run in runs)
    dates = sorted(run["date"][:10] for run in runs)
    period = " to ".join(dict.fromkeys([dates[0], dates[-1]]))
    commands = list(dict.fromkeys(_run(run) for run in runs))
    if len(commands) == 1 and len(commands[0]) <= SHORT:
        return commands
    return [f'??? note "Measured on {"; ".join(machines)}, {period}"', *(f"    - {command}" for command in commands)]


def _machine(hardware: dict[str, Any]) -> str:
    devices = hardware.get("gpus") or [hardware.get("device") or hardware["cpu"]]
    cores = hardware["cores"]
    count = " and ".join(map(str, cores)) if isinstance(cores, list) else cores
    return ", ".join([*devices, f"{count} cores"])


def _run(run: dict[str, Any]) -> str:
    words = [f"`{WRITTEN_TO.sub('', run['command'])}`", f"{run['date'][:16].replace('T', ' ')} UTC"]
    note = run.get("note", "")
    for text, term in CURRENT_TERMS.items():
        note = note.replace(text, term) if " " in text else note
    return ", ".join([*words, _machine(run["hardware"]), *([note] if note else [])])


if __name__ == "__main__":
    pages = [Path(name).resolve() for name in sys.argv[1:]] or [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]
    for page in pages:
        text = page.read_text()
        if (new := rewritten(text)) != text:
            page.write_text(new)
            print(f"updated: {page.relative_to(DOCS.parent)}")
