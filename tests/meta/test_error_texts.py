"""Every error text of the package in one list, as users see it, with checks of its form.

`python tests/meta/test_error_texts.py` prints the list: one line per error, and `{...}` for inserted values.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from nestrec.base.errors import UserError

ROOT = Path(__file__).parents[2]
FOLDERS = ("nestrec", "benchmarks/nestrec_bench")
PREDICATES = re.compile(r"(is|are) (no|none|nothing|to be|not to be)\b|(says?|said|stands?|lies|tells?|has no)\b")
"""Beginnings of a problem that cannot be read on their own."""
VAGUE_REMEDIES = re.compile(r"(give|take|mend|leave)\b", re.IGNORECASE)


@dataclass(frozen=True)
class ErrorText:
    """An error that the source code can raise."""

    file: str
    line: int
    kind: str
    option: str
    problem: str
    remedy: str

    def render(self) -> str:
        error = UserError(self.problem, option=self.option or None, value="{value}", remedy=self.remedy or None)
        return str(error)


def user_error_classes() -> set[str]:
    """Return the names of `UserError` and of all classes of the package that extend it."""
    names = {"UserError"}
    bases: dict[str, set[str]] = {}
    for file in source_files():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    while more := {name for name, of in bases.items() if of & names} - names:
        names |= more
    return names - {"UserErrorGroup"}


def source_files() -> Iterator[Path]:
    for folder in FOLDERS:
        yield from sorted((ROOT / folder).rglob("*.py"))


def text_of(node: ast.expr | None, scope: ast.AST) -> str:  # noqa: PLR0911
    """Return a text with `{...}` for inserted values; a local variable is replaced by the text assigned to it."""
    match node:
        case None:
            return ""
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=values):
            return "".join(text_of(value, scope) for value in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return text_of(left, scope) + text_of(right, scope)
        case ast.IfExp(body=body):
            return text_of(body, scope)
        case ast.BoolOp(values=values):
            return text_of(values[-1], scope)
        case ast.Name(id=name):
            for statement in ast.walk(scope):
                if not isinstance(statement, ast.Assign) or isinstance(statement.value, ast.Name):
                    continue
                if any(ast.unparse(target) == name for target in statement.targets):
                    return text_of(statement.value, scope)
    return "{...}"


def error_texts() -> list[ErrorText]:
    classes = user_error_classes()
    found = []
    for file in source_files():
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for scope in ast.walk(tree):
            if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for node in ast.walk(scope):
                if not isinstance(node, ast.Call):
                    continue
                name = ast.unparse(node.func).rpartition(".")[2]
                keywords = {keyword.arg: keyword.value for keyword in node.keywords}
                is_collected = name in ("require", "add") and keywords.keys() & {"option", "remedy"}
                arguments = node.args[1:] if name == "require" else node.args
                if (name in classes or is_collected) and arguments:
                    option = text_of(keywords.get("option"), scope)
                    remedy = text_of(keywords.get("remedy"), scope)
                    problem = text_of(arguments[0], scope)
                    path = str(file.relative_to(ROOT))
                    found.append(ErrorText(path, node.lineno, name, option, problem, remedy))
    return sorted(set(found), key=lambda text: (text.file, text.line))


@pytest.fixture(scope="module")
def texts() -> list[ErrorText]:
    return error_texts()


def test_error_texts_are_all_found(texts: list[ErrorText]) -> None:
    assert len(texts) > 500
    assert {text.kind for text in texts} >= {"UserError", "DataError", "CorruptFileError", "require", "add"}


def rendered(texts: list[ErrorText]) -> list[str]:
    return [f"{text.file}:{text.line}: {text.render()}" for text in texts]


def test_error_problems_are_statements(texts: list[ErrorText]) -> None:
    assert rendered([text for text in texts if PREDICATES.match(text.problem)]) == []


def test_error_problems_have_no_final_period(texts: list[ErrorText]) -> None:
    assert rendered([text for text in texts if text.problem.endswith(".") or text.remedy.endswith(".")]) == []


def test_error_remedies_name_an_action(texts: list[ErrorText]) -> None:
    assert rendered([text for text in texts if VAGUE_REMEDIES.match(text.remedy)]) == []


def test_error_messages_are_one_paragraph(texts: list[ErrorText]) -> None:
    assert rendered([text for text in texts if "\n" in text.problem or "\n" in text.remedy]) == []


def test_error_texts_with_a_vague_form_are_found() -> None:
    text = ErrorText("x.py", 1, "UserError", "batch", "is no number", "give a number")
    assert PREDICATES.match(text.problem)
    assert VAGUE_REMEDIES.match(text.remedy)
    assert text.render() == "batch={value}: is no number. Give a number."


if __name__ == "__main__":
    for error in error_texts():
        print(f"{error.file}:{error.line}: {error.render()}")
