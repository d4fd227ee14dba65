"""Checks the layout of the project: import order at every depth, what starts quickly, what stays outside."""

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from support.import_graph import Reference, cycles, edges, module_name, references

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "nestrec"
LAYERS = {
    "nestrec": (
        "base", "trace", "jagged", "ops", "models", "data", "distributed", "balance", "embedding", "pipeline", "tasks",
        "artifacts", "checkpoint", "training", "planning", "serving", "exporters", "client", "inference", "api",
        "report", "tuning", "cli", "__main__",
    ),
    "nestrec.serving": (
        "core", "history_store", "model", "inputs", "kv_cache", "engine", "versions", "service", "security", "http",
        "frontend", "server", "fleet",
    ),
}  # fmt: skip
"""Import order of the children of a folder; in folders that are not listed, any order without a cycle will do."""
FORBIDDEN = (
    *(("nestrec.serving", f"nestrec.{name}") for name in ("pipeline", "checkpoint", "training", "planning")),
    ("nestrec.client", "torch"),
    ("nestrec.ops", "torch.distributed"),
    ("nestrec.models", "torch.distributed"),
    ("nestrec", "benchmarks"),
    ("nestrec", "nestrec_bench"),
    ("nestrec", "tests"),
    ("nestrec", "support"),
    ("nestrec_bench", "tests"),
    ("nestrec_bench", "support"),
)
"""(folder, what no module below it may refer to), although the order would allow some of it."""
REGISTRIES = {
    "nestrec.models.backbone_registry": "nestrec.models",
    "nestrec.tasks.task_registry": "nestrec.tasks",
    "nestrec.embedding.row_optimizer": "nestrec.embedding",
    "nestrec.pipeline.schedule_spec": "nestrec.pipeline",
    "nestrec.data.formats.format_registry": "nestrec.data",
    "nestrec.data.streaming.stream_source": "nestrec.data",
    "nestrec.serving.http.routes": "nestrec.serving.http",
    "nestrec.serving.model.serving_spec": "nestrec.serving.model",
    "nestrec_bench.bench": "nestrec_bench",
}
"""Modules whose strings name built-in plugins, and the folder in which these are."""
COMPAT = "nestrec.base.compat"
"""The only module that may use private names of the libraries below."""
PRIVATE_OF = {
    "torch": ("torch.distributed.distributed_c10d",),
    "numba": ("numba.core", "numba.np", "numba.cpython"),
    "uvicorn": ("uvicorn.config", "uvicorn.protocols", "uvicorn.server"),
    "threading": (),
    "atexit": (),
}
"""Libraries, and their modules that are internal although no part of the name begins with an underscore."""
INHERITED = {"_unset_keepalive_if_required", "_non_persistent_buffers_set"}
"""Private attributes of objects whose class is not visible in the syntax tree."""
CORE = LAYERS["nestrec"][: LAYERS["nestrec"].index("pipeline") + 1]
CORE_LIBRARIES = {"torch", "triton", "numpy", "numba"}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))


def files_of(name: str) -> list[Path]:
    folder = PACKAGE / name
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{name}.py"]


@functools.cache
def sources_of_project() -> Mapping[str, str]:
    sources = {path.relative_to(ROOT).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
    benchmarks = ROOT / "benchmarks"
    for path in (benchmarks / "nestrec_bench").rglob("*.py"):
        sources[path.relative_to(benchmarks).as_posix()] = path.read_text()
    return sources


def problems_of(sources: Mapping[str, str]) -> list[str]:
    """Returns one line for each violation of the layout, with file, line and the name that is referred to."""
    found = [reference for reference in references(sources) if not _is_registry_entry(reference)]
    folders = sorted(module_name(path) for path in sources if path.endswith("__init__.py"))
    problems = []
    for folder in folders:
        pairs = edges(found, folder)
        for cycle in cycles(pairs):
            inner = [str(reference) for pair, reference in pairs.items() if set(pair) <= set(cycle)]
            problems.append(f"import cycle in {folder}: {', '.join(cycle)} ({'; '.join(inner)})")
    for folder, order in LAYERS.items():
        for (source, target), reference in edges(found, folder).items():
            unlisted = [child for child in (source, target) if child not in order]
            if unlisted:
                problems.append(f"{', '.join(unlisted)} not listed in LAYERS of {folder} ({reference})")
            elif order.index(source) < order.index(target):
                problems.append(f"upward import in {folder}: {source} is below {target} ({reference})")
    problems += [str(reference) for reference in found for rule in FORBIDDEN if _breaks(reference, *rule)]
    return problems


def _is_registry_entry(reference: Reference) -> bool:
    folder = REGISTRIES.get(reference.source)
    return reference.is_string and folder is not None and reference.target.startswith(folder + ".")


def _breaks(reference: Reference, folder: str, target: str) -> bool:
    return f"{reference.source}.".startswith(f"{folder}.") and f"{reference.target}.".startswith(f"{target}.")


def private_uses(path: str, source: str) -> list[str]:
    """Returns one line for each private name of a library of `PRIVATE_OF` that a module uses."""
    tree = ast.parse(source)
    bound: dict[str, str] = {}
    used: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                bound |= {one.asname or one.name.split(".")[0]: one.name if one.asname else "" for one in names}
                used += [(node.lineno, one.name) for one in names]
            case ast.ImportFrom(module=str(module), names=names, level=0):
                bound |= {one.asname or one.name: f"{module}.{one.name}" for one in names}
                used += [(node.lineno, f"{module}.{one.name}") for one in names]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            used += [(node.lineno, node.attr)] if node.attr in INHERITED else []
            name = ast.unparse(node)
            root, *rest = name.split(".")
            if root in bound and re.fullmatch(r"[\w.]+", name):
                used.append((node.lineno, ".".join([bound[root] or root, *rest])))
    return [f"{path}:{line} uses {name}" for line, name in used if _is_private(name)]


def _is_private(name: str) -> bool:
    library, *parts = name.split(".")
    if library not in PRIVATE_OF:
        return name in INHERITED
    has_private_part = any(part.startswith("_") and not part.startswith("__") for part in parts)
    return has_private_part or any(f"{name}.".startswith(f"{module}.") for module in PRIVATE_OF[library])


def test_layout_private_names_are_used_in_compat_alone():
    sources = {path: source for path, source in sources_of_project().items() if path.startswith("nestrec/")}
    others = {path: source for path, source in sources.items() if module_name(path) != COMPAT}
    assert [problem for path, source in others.items() for problem in private_uses(path, source)] == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._foreach_mul_(x, 2)",
        "import torch.nn as nn\nnn._reduction",
        "def f():\n    from torch._utils import x",
        "from torch.distributed import _symmetric_memory",
        "from torch.distributed.distributed_c10d import PrefixStore",
        "from numba.core import cgutils",
        "import numba\nnumba.np.arrayobj",
        "from uvicorn.server import ServerState",
        "import threading as t\nt._shutdown()",
        "import atexit\natexit._run_exitfuncs()",
        "self._unset_keepalive_if_required()",
    ],
)
def test_layout_private_name_check_finds_planted_names(source):
    assert private_uses("nestrec/x.py", source) != []


def test_layout_private_name_check_allows_public_names():
    source = "import torch, uvicorn\ntorch.__version__, torch.mul, uvicorn.Server, self._own\nfrom numba import types"
    assert private_uses("nestrec/x.py", source) == []


def test_layout_imports_follow_the_order():
    assert problems_of(sources_of_project()) == []


@pytest.mark.parametrize(
    ("path", "line", "expected"),
    [
        ("nestrec/data/prepare/parse.py", "from nestrec.data.prepare.log_source import LogSource", "import cycle"),
        (
            "nestrec/data/prepare/parse.py",
            "def f():\n    from nestrec.tasks.metrics import x",
            "upward import in nestrec",
        ),
        ("nestrec/base/errors.py", "if TYPE_CHECKING:\n    from nestrec.data.dataset import Dataset", "upward import"),
        ("nestrec/serving/core/asgi.py", "import nestrec.serving.http.http_app", "upward import in nestrec.serving"),
        ("nestrec/training/trainer.py", 'X = "nestrec.exporters.version_publisher:Publisher"', "upward import"),
        ("nestrec/base/errors.py", 'importlib.import_module("nestrec.cli.app")', "upward import"),
        ("nestrec/training/trainer.py", "from nestrec_bench.bench import Bench", "nestrec_bench"),
        ("nestrec/training/trainer.py", "def f():\n    import support.fault_runner", "support.fault_runner"),
        ("nestrec_bench/bench.py", "from tests.support.tiny_runs import config_of", "tests.support"),
        (
            "nestrec/serving/server.py",
            "from nestrec.checkpoint import CheckpointManager as Checkpoints",
            "nestrec.checkpoint",
        ),
        ("nestrec/report/new_page.py", "from nestrec.unlisted import x", None),
    ],
)
def test_layout_check_finds_planted_violations(path, line, expected):
    sources = dict(sources_of_project())
    sources[path] = sources.get(path, "") + f"\n{line}\n"
    problems = problems_of(sources)
    assert bool(problems) == (expected is not None)
    assert expected is None or any(expected in problem for problem in problems)


def test_layout_order_is_documented():
    page = (ROOT / "docs" / "architecture.md").read_text()
    for folder, order in LAYERS.items():
        table = page.partition(f"| `{folder.replace('.', '/')}/` |")[2].partition("\n\n")[0]
        assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [name for name in order if name != "__main__"]


def test_layout_basenames_are_unique():
    names = Counter(Path(path).name for path in sources_of_project() if path.startswith("nestrec/"))
    assert [name for name, count in names.items() if count > 1 and name != "__init__.py"] == []


@pytest.mark.parametrize("folder", CORE)
def test_layout_core_imports_few_libraries(folder):
    allowed = CORE_LIBRARIES | ({"pyarrow"} if folder == "data" else set())
    for path in files_of(folder):
        outer: set[str] = set()
        for node in tree_of(path).body:
            if isinstance(node, ast.Import):
                outer |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                outer.add(node.module.split(".")[0])
        outer -= {"nestrec", *sys.stdlib_module_names}
        assert outer <= allowed, f"{path.relative_to(ROOT)} imports {sorted(outer - allowed)}"


def test_layout_init_files_only_re_export():
    allowed = (ast.ImportFrom, ast.Expr, ast.Assign, ast.AnnAssign)
    for path in PACKAGE.rglob("__init__.py"):
        nodes = [node for node in tree_of(path).body if not _is_for_type_checkers(node)]
        if path.parent.name != "recipes":
            assert all(isinstance(node, allowed) for node in nodes), path


def _is_for_type_checkers(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def test_layout_start_up_loads_nothing_heavy():
    heavy = ("torch", "numba", "pyarrow", "numpy", "httpx")
    code = f"import sys, nestrec, nestrec.cli.app, nestrec.client; print([m for m in {heavy} if m in sys.modules])"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=250
    ).stdout
    assert output.strip() == "[]"


def test_layout_test_files_have_unique_names():
    """pytest imports test files by their bare names, and two with one name collide."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_layout_python_users_need_no_server_packages():
    """Training, loading, recommending and exporting work without the packages of the extra `serve`."""
    extras = ("uvicorn", "httptools", "uvloop", "orjson", "prometheus_client")
    code = f"import sys; sys.modules.update(dict.fromkeys({extras}))\n"
    code += "import nestrec, nestrec.serving.inputs.request_resolver\n"
    code += "nestrec.load, nestrec.train, nestrec.export, nestrec.publish"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=250)


def test_layout_rules_of_correctness_are_cited_by_name():
    """docs/architecture.md names them; a number would mean nothing to a reader."""
    for folder in ("nestrec", "tests", "docs", "examples"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".md"} and path != Path(__file__).resolve():
                assert not re.search(r"\b[Rr]ules? \d", path.read_text()), path


def test_layout_every_module_is_used_by_the_package():
    modules = {module_name(path): path for path in sources_of_project() if path.startswith("nestrec/")}
    used: set[str] = set()
    for reference in references(sources_of_project()):
        used.add(reference.target)
    for path in PACKAGE.rglob("*.py"):
        for node in nodes_of(path):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                used |= set(re.findall(r"nestrec(?:\.\w+)+", node.value))
    unused = [module for module in modules if module not in used]
    assert [name for name in unused if not modules[name].endswith(("__init__.py", "__main__.py"))] == []


def test_layout_only_schedules_drive_the_engine():
    """Everything else trains by a `PipelineCore`: a step that is driven by hand is not the one in use."""
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] not in {"embedding", "pipeline"}:
            calls = [node.func for node in nodes_of(path) if isinstance(node, ast.Call)]
            called = {call.attr for call in calls if isinstance(call, ast.Attribute)}
            assert not called & {"write_back", "exchange_gradients"}, path


def test_layout_every_test_folder_is_in_a_test_command() -> None:
    """Folders that need a device or an environment of their own have a command of their own."""
    named = set(re.findall(r"\btests/(\w+)", (ROOT / "Makefile").read_text())) | {"gpu"}
    folders = {path.parent.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").rglob("*/test_*.py")}
    assert sorted(folders - named) == []
