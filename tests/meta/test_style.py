"""Checks rules of style that the linter does not have."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("nestrec", "benchmarks", "tests", "examples", "docs", "deploy")


def packed_assignments(source: str) -> list[int]:
    """Returns the lines of assignments such as `a, b = x, f(y)`, whose values have nothing in common.

    A swap, a rotation and several values of one kind (`a, b = 0, 1`, `a, b = f(x), f(y)`) stay on one line. Kernels are
    not looked at: Triton finds compiled code by the text of their source.
    """
    tree = ast.parse(source)
    kernels = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any(re.search("triton|gluon", ast.unparse(d)) for d in node.decorator_list)
        for inner in ast.walk(node)
    }
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and id(node) not in kernels and _is_packed(node)
    ]


def _is_packed(node: ast.Assign) -> bool:
    target = node.targets[0]
    if not isinstance(target, ast.Tuple) or not isinstance(node.value, ast.Tuple):
        return False
    if any(isinstance(element, ast.Starred) for element in (*target.elts, *node.value.elts)):
        return False
    assigned = _names(target)
    used = _names(node.value)
    kinds = {
        type(value.value) if isinstance(value, ast.Constant) else re.split(r"[(\[{]", ast.unparse(value))[0]
        for value in node.value.elts
    }
    return len(kinds) > 1 and not assigned & used


def _names(side: ast.expr) -> set[str]:
    return {ast.unparse(part) for part in ast.walk(side) if isinstance(part, ast.Name | ast.Attribute)} - {"self"}


def test_style_assigns_unrelated_values_on_lines_of_their_own():
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    found = [f"{path.relative_to(ROOT)}:{line}" for path in paths for line in packed_assignments(path.read_text())]
    assert found == []


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ("a, b = x, f(y)", True),
        ("self.a, self.b = a, 3", True),
        ("a, b = b, a", False),
        ("a, b = 0, 1", False),
        ("a, b = f(x), f(y)", False),
        ("@triton.jit\ndef kernel():\n    a, b = x, 3", False),
    ],
)
def test_style_check_tells_packed_assignments_apart(source, is_found):
    assert bool(packed_assignments(source)) == is_found
