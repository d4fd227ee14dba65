"""Finds every reference from one module of the package to another, and checks their order.

A reference is an import anywhere in the syntax tree (in functions, in `try`, under `TYPE_CHECKING`), or a string that
is exactly `package.module` or `package.module:attribute`, such as the argument of `importlib.import_module`. The
functions take sources as text, so that tests can pass planted violations without writing files.
"""

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

DOTTED_NAME = re.compile(r"[A-Za-z_]\w*(?:\.\w+)+(?::\w+)?")


@dataclass(frozen=True)
class Reference:
    """A reference of a module to another one."""

    source: str
    line: int
    target: str
    is_string: bool = False

    def __str__(self) -> str:
        kind = "names" if self.is_string else "imports"
        return f"{self.source}:{self.line} {kind} {self.target}"


def module_name(path: str) -> str:
    """Returns the dotted name of a file, such as `nestrec.base.errors` for `nestrec/base/errors.py`."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def references(sources: Mapping[str, str]) -> list[Reference]:
    """Returns the references of all modules, by dotted name; `sources` maps paths to texts."""
    modules = {module_name(path) for path in sources}
    found = []
    for path, text in sources.items():
        source = module_name(path)
        for line, target, is_string in _named(text, source, path.endswith("__init__.py")):
            known = _known_module(target, modules)
            if known != source:
                found.append(Reference(source, line, known, is_string))
    return found


def _known_module(name: str, modules: set[str]) -> str:
    """Returns the longest prefix that is a module of the package, or the name if there is none."""
    parts = name.split(".")
    for size in range(len(parts), 0, -1):
        prefix = ".".join(parts[:size])
        if prefix in modules:
            return prefix
    return name


@functools.cache
def _named(text: str, source: str, is_package: bool) -> tuple[tuple[int, str, bool], ...]:
    return tuple(_iterate_names(ast.parse(text), source, is_package=is_package))


def _iterate_names(tree: ast.Module, source: str, *, is_package: bool) -> Iterator[tuple[int, str, bool]]:
    docstrings = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                docstrings.add(id(statement.value))
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield node.lineno, alias.name, False
            case ast.ImportFrom(module=module, names=names, level=level):
                base = source.split(".")[: len(source.split(".")) - level + is_package] if level else []
                prefix = ".".join([*base, *([module] if module else [])])
                for alias in names:
                    yield node.lineno, f"{prefix}.{alias.name}", False
            case ast.Constant(value=str(value)) if id(node) not in docstrings and DOTTED_NAME.fullmatch(value):
                yield node.lineno, value.partition(":")[0], True


def edges(found: Sequence[Reference], folder: str) -> dict[tuple[str, str], Reference]:
    """Returns the references between the children of a folder, one for each pair of children."""
    result: dict[tuple[str, str], Reference] = {}
    prefix = folder + "."
    for reference in found:
        if reference.source.startswith(prefix) and reference.target.startswith(prefix):
            pair = reference.source[len(prefix) :].split(".")[0], reference.target[len(prefix) :].split(".")[0]
            if pair[0] != pair[1]:
                result.setdefault(pair, reference)
    return result


def cycles(pairs: Mapping[tuple[str, str], Reference]) -> list[list[str]]:
    """Returns the strongly connected components of more than one child."""
    graph: dict[str, set[str]] = defaultdict(set)
    for source, target in pairs:
        graph[source].add(target)
    reached = {node: _reachable(graph, node) for node in list(graph)}
    components = {
        frozenset({node, *(other for other in reached[node] if node in reached.get(other, ()))})
        for node in graph
        if node in reached[node]
    }
    return sorted(sorted(component) for component in components)


def _reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for target in graph.get(waiting.pop(), ()):
            if target not in found:
                found.add(target)
                waiting.append(target)
    return found
