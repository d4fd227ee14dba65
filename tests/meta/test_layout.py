"""The shape of the project: who may import whom, and how quickly it starts."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "nestrec"
ORDER = [
    "base", "trace", "jagged", "ops", "models", "data", "distributed", "balance", "embedding", "pipeline", "tasks",
    "checkpoint", "training", "planning", "serving", "client", "library", "report", "bench", "testing",
]  # fmt: skip
CORE = ORDER[: ORDER.index("pipeline") + 1]
CORE_LIBRARIES = {"torch", "triton", "numpy", "numba"}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))


@functools.cache
def imports_of(path: Path, *, top_level_only: bool = False) -> set[str]:
    nodes = tree_of(path).body if top_level_only else nodes_of(path)
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def files_of(folder: str) -> list[Path]:
    return sorted((PACKAGE / folder).rglob("*.py"))


@pytest.mark.parametrize("folder", ORDER)
def test_a_folder_imports_only_from_those_above_it(folder):
    allowed = {*ORDER[: ORDER.index(folder) + 1]}
    for path in files_of(folder):
        inner = {name.split(".")[1] for name in imports_of(path) if name.startswith("nestrec.")}
        assert inner <= allowed, f"{path.relative_to(ROOT)} imports {sorted(inner - allowed)}"


def test_no_other_folder_imports_testing():
    for path in PACKAGE.rglob("*.py"):
        if "testing" not in path.relative_to(PACKAGE).parts:
            assert not any(name.startswith("support") for name in imports_of(path)), path


@pytest.mark.parametrize("folder", CORE)
def test_the_core_imports_few_libraries(folder):
    allowed = CORE_LIBRARIES | ({"pyarrow"} if folder == "data" else set())
    for path in files_of(folder):
        outer = {name.split(".")[0] for name in imports_of(path, top_level_only=True)}
        outer -= {"nestrec", *sys.stdlib_module_names}
        assert outer <= allowed, f"{path.relative_to(ROOT)} imports {sorted(outer - allowed)}"


def test_models_know_nothing_of_ranks():
    for path in [*files_of("models"), *files_of("ops")]:
        assert not any(name.startswith("torch.distributed") for name in imports_of(path)), path


def test_init_files_only_re_export():
    allowed = (ast.ImportFrom, ast.Expr, ast.Assign, ast.AnnAssign, ast.FunctionDef)
    for path in PACKAGE.rglob("__init__.py"):
        nodes = [node for node in tree_of(path).body if not _is_for_type_checkers(node)]
        if path.parent.name != "recipes":
            assert all(isinstance(n, allowed[:-1]) for n in nodes), path


def _is_for_type_checkers(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def test_importing_the_package_loads_nothing_heavy():
    heavy = ("torch", "numba", "pyarrow", "numpy")
    code = f"import sys, nestrec, nestrec.cli.app, nestrec.client; print([m for m in {heavy} if m in sys.modules])"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=250
    ).stdout
    assert output.strip() == "[]"


def test_test_files_have_names_of_their_own():
    """pytest imports test files by their bare names, and two of one name collide."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names)), sorted({name for name in names if names.count(name) > 1})


def test_what_python_users_call_needs_no_server():
    """The extra packages of `nestrec serve` need not be there to train, load, recommend and export."""
    extras = ("uvicorn", "httptools", "uvloop", "orjson", "prometheus_client")
    code = f"import sys; sys.modules.update(dict.fromkeys({extras}))\n"
    code += "import nestrec, nestrec.serving.inputs.request_resolver, nestrec.serving.inputs.request_resolver\n"
    code += "nestrec.load, nestrec.train, nestrec.export, nestrec.publish"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=250)


def test_rules_of_correctness_are_cited_by_name():
    """docs/architecture.md names them; numbers would mean nothing to a reader."""
    for folder in ("nestrec", "tests", "docs", "examples"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".md"} and path != Path(__file__).resolve():
                assert not re.search(r"\b[Rr]ules? \d", path.read_text()), path


def test_no_folder_has_more_than_25_modules_of_its_own():
    for folder in [path.parent for path in PACKAGE.rglob("__init__.py")]:
        assert len(list(folder.glob("*.py"))) <= 25, folder


def test_the_benches_are_smaller_than_what_they_measure():
    def lines(*folders: str) -> int:
        return sum(len(path.read_text().splitlines()) for folder in folders for path in files_of(folder))

    assert lines("bench") < lines("embedding", "pipeline")


def test_no_module_is_imported_by_tests_alone():
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    used: set[str] = set()
    for path in modules.values():
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom) and node.module:
                used |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                used |= {alias.name for alias in node.names}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                used |= set(re.findall(r"nestrec(?:\.\w+)+", node.value))
    for module, path in modules.items():
        if path.name not in {"__init__.py", "__main__.py"} and "testing" not in path.parts:
            assert module in used, f"{module} is imported by nothing"


def test_no_two_public_classes_have_one_name():
    """A name that is read in a trace, a page or an import means one thing. Inside a module a class is private."""
    homes: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(path.relative_to(ROOT).as_posix())
    assert not {name: found for name, found in homes.items() if len(found) > 1}


def test_only_schedules_drive_the_engine():
    """Everything else trains by `TrainingPipeline`: a step that is driven by hand is not the one in use."""
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] not in {"embedding", "pipeline"}:
            calls = [node.func for node in nodes_of(path) if isinstance(node, ast.Call)]
            called = {call.attr for call in calls if isinstance(call, ast.Attribute)}
            assert not called & {"write_back", "exchange_gradients"}, path


def test_every_folder_of_tests_is_in_the_test_command() -> None:
    """Others need a device or an environment of their own, and have a command of their own."""
    named = set(re.findall(r"\btests/(\w+)", (ROOT / "Makefile").read_text())) | {"gpu"}
    folders = {path.parent.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").rglob("*/test_*.py")}
    assert sorted(folders - named) == []
