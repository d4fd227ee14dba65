"""Mutation testing: plants small faults in the code, one at a time, and reports those that no test detects.

    make mutants FOLDER=nestrec/tasks
    python tests/mutants.py --folders nestrec/tasks nestrec/checkpoint --sample 300 --jobs 16 --minutes 14 --output FILE

The faults are those of the mutation operators of `mutmut`. Its own runner does not fit this code: it leaves out
decorated functions and reaches no compiled loop. Here one process imports what all tests need (torch, pyarrow and the
folders of nestrec that come before the mutated ones) and forks for each mutant. The child imports the mutated source
in the place of the original and runs the tests that execute the mutated lines, until the first failure. Which tests
those are comes from one run of all tests under `coverage`, kept in `build/mutants` until a source or a test changes.

FILE contains the result of every mutant, and next to it FILE with the suffix `.md` lists the survivors. A run that
finds FILE skips the mutants in it, and keeps each `why` that was written there for a survivor. What is not mutated:
code outside functions, annotations, docstrings, texts for people, `raise` and `assert` statements, `zip(strict=True)`.
"""

import argparse
import contextlib
import difflib
import functools
import hashlib
import importlib
import importlib.util
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / "build" / "mutants"
SHARED = (
    "torch", "numba", "pyarrow.csv", "pyarrow.json", "pyarrow.parquet", "safetensors.torch", "pytest", "hypothesis",
    "nestrec.distributed", "nestrec.models.backbone_registry", "nestrec.models.heads", "nestrec.embedding",
)  # fmt: skip
"""What is imported once; none of it may import a mutated module."""
TESTS = (
    "tests/unit/tasks", "tests/unit/data", "tests/unit/checkpoint", "tests/unit/training", "tests/unit/library",
    "tests/unit/planning/test_placements.py",
)  # fmt: skip
MOST_SECONDS_OF_TESTS = 60.0
"""For one mutant."""
MOST_CASES = 3
"""Of a parametrized test, the shortest ones."""
FOUND = "found.json"
INTERNAL = 70
"""Exit status of a child that failed outside pytest."""
STATUSES = ("killed", "timeout", "survived", "untested")
SURVIVES = STATUSES[2:]
TEXT_CALLS = {"_report", "_note", "report", "note", "print", "warn", "warning", "info", "fail_point", "did_you_mean"}
INVARIANT_CALLS = {"len", "isinstance", "cast"}
NUMBERS = {"nan", "inf"}
"""Strings of `float`, which does not distinguish cases."""
TEXT_NAMES = {"problem", "remedy", "note", "message", "reason", "what"}


@functools.cache
def result_files() -> Any:
    """Returns the module of result files without its package, which imports modules that are mutated."""
    spec = importlib.util.spec_from_file_location("result_file", ROOT / "nestrec" / "report" / "result_file.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass
class Mutant:
    file: str
    number: int
    function: str
    lines: range
    is_compiled: bool
    original: cst.CSTNode = field(repr=False)
    mutated: cst.CSTNode = field(repr=False)

    @property
    def name(self) -> str:
        return f"{self.file}#{self.number}"


class MutantsOfFile(cst.CSTVisitor):
    """Collects the mutants of the functions of one module."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, file: str) -> None:
        self.file = file
        self.wrapper = MetadataWrapper(cst.parse_module((ROOT / file).read_text()))
        self.found: list[Mutant] = []
        self._scopes: list[cst.FunctionDef | cst.ClassDef] = []
        self._statement: range | None = None
        self.wrapper.visit(self)

    def source(self, mutant: Mutant) -> str:
        module = self.wrapper.module.deep_replace(mutant.original, mutant.mutated)
        assert isinstance(module, cst.Module)
        return module.code

    def on_visit(self, node: cst.CSTNode) -> bool:
        if _is_left_out(node):
            return False
        if isinstance(node, cst.SimpleStatementLine):
            self._statement = self._lines(node)
        if self._is_of_function(node):  # defaults matter where the function runs
            self._statement = self._lines(self._scopes[-1])
        functions = [scope for scope in self._scopes if isinstance(scope, cst.FunctionDef)]
        if functions:
            is_compiled = any("njit" in cst.Module([]).code_for_node(d) for d in functions[0].decorators)
            function = ".".join(scope.name.value for scope in self._scopes)
            lines = self._statement or self._lines(node)
            for mutated in _mutations(node):
                number = len(self.found)
                self.found.append(Mutant(self.file, number, function, lines, is_compiled, node, mutated))
        if isinstance(node, cst.FunctionDef | cst.ClassDef):
            self._scopes.append(node)
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if isinstance(original_node, cst.SimpleStatementLine) or self._is_of_function(original_node):
            self._statement = None
        if self._scopes and original_node is self._scopes[-1]:
            self._scopes.pop()

    def _is_of_function(self, node: cst.CSTNode) -> bool:
        """Return whether these are the parameters of a function, and not those of a lambda."""
        scope = self._scopes[-1] if self._scopes else None
        return isinstance(scope, cst.FunctionDef) and node is scope.params

    def _lines(self, node: cst.CSTNode) -> range:
        position = self.get_metadata(PositionProvider, node)
        return range(position.start.line, position.end.line + 1)


def _is_left_out(node: cst.CSTNode) -> bool:
    if isinstance(node, cst.SimpleString | cst.ConcatenatedString):
        return _is_text(node)
    if isinstance(node, cst.Expr):
        return isinstance(node.value, cst.SimpleString | cst.ConcatenatedString)
    if isinstance(node, cst.Assign):
        return any(_is_text(target.target) for target in node.targets)
    if isinstance(node, cst.Subscript):
        return isinstance(node.value, cst.Name) and node.value.value in {"Literal", "NDArray"}
    if isinstance(node, cst.Call):
        called = node.func.attr if isinstance(node.func, cst.Attribute) else node.func
        name = called.value if isinstance(called, cst.Name) else ""
        return name.endswith("Error") or name in TEXT_CALLS | INVARIANT_CALLS
    return isinstance(node, cst.Raise | cst.Assert | cst.Annotation | cst.Decorator | cst.FormattedString)


def _is_text(node: cst.CSTNode) -> bool:
    """Return whether this is a text for people (a string with a space, or a variable that usually holds one) or nan."""
    if isinstance(node, cst.Name):
        return node.value in TEXT_NAMES
    code = cst.Module([]).code_for_node(node)
    return isinstance(node, cst.BaseString) and (" " in code or code.strip("'\"") in NUMBERS)


def _mutations(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    for kind, operator in mutation_operators:
        if isinstance(node, kind):
            for mutated in operator(node):
                if isinstance(node, cst.Call) and isinstance(mutated, cst.Call):
                    rest = [id(argument) for argument in mutated.args]
                    changed = [argument for argument in node.args if id(argument) not in rest]
                    if any(_is_text(a.value) or (a.keyword and a.keyword.value == "strict") for a in changed):
                        continue
                yield mutated


class MutatedModule:
    """A finder that gives one module another source."""

    def __init__(self, module: str, path: Path) -> None:
        self._module = module
        self._path = path

    def find_spec(self, name: str, *_: object) -> Any:
        return importlib.util.spec_from_file_location(name, self._path) if name == self._module else None


class Contexts:
    """A plugin of pytest: names the test, or the file of a shared fixture, to which coverage counts lines."""

    def __init__(self, switch: Callable[[str], None]) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: list[str] = []
        self._switch = switch
        self._test = ""

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._test = nodeid
        self._switch(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration
        if not report.passed:
            self.failed.append(report.nodeid)

    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> None:
        self._switch(self._test if fixturedef.scope == "function" else self._test.partition("::")[0])

    def pytest_pyfunc_call(self) -> None:
        self._switch(self._test)

    def pytest_configure(self) -> None:
        """A failing example is enough: it need not be made smaller."""
        from hypothesis import Phase, settings

        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutants", settings.get_profile("nestrec"), phases=phases)
        settings.load_profile("mutants")


def run_pytest(tests: list[str], folder: Path, plugin: Contexts, *options: str) -> int:
    import pytest

    usual = ["-q", "--tb=no", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:xdist"]
    return int(pytest.main([*usual, *options, f"--basetemp={folder / 'tests'}", *tests], plugins=[plugin]))


def cover(file: str, sources: list[str], folder: Path) -> None:
    """Save the lines of the sources that each test of a file executes, and the seconds of each test."""
    import coverage

    measured = coverage.Coverage(data_file=None, config_file=False, source=sources)
    measured.start()
    plugin = Contexts(measured.switch_context)
    if run_pytest([file], folder, plugin) and not plugin.failed:
        plugin.failed = [file]  # it could not be collected
    measured.stop()
    data = measured.get_data()
    lines = {str(Path(name).relative_to(ROOT)): data.contexts_by_lineno(name) for name in data.measured_files()}
    seconds = {test: s for test, s in plugin.seconds.items() if test not in plugin.failed}
    (folder / FOUND).write_text(json.dumps({"lines": lines, "seconds": seconds, "failed": plugin.failed}))


def judge(mutant: Mutant, module: MutantsOfFile, tests: list[str], limit_s: float, folder: Path) -> int:
    """Run tests with a mutated module, each up to a limit; 0 if all pass."""
    source = module.source(mutant)
    found = change((ROOT / mutant.file).read_text(), source)
    (folder / FOUND).write_text(json.dumps(found))
    if not tests:
        return 0
    path = folder / Path(mutant.file).name  # another path than the original's, whose compiled loops are cached
    path.write_text(source)
    sys.meta_path.insert(0, MutatedModule(_module_name(mutant.file), path))
    return run_pytest(tests, folder, Contexts(lambda test: None), "-x", "-o", f"timeout={limit_s:.0f}")


def change(before: str, after: str) -> dict[str, Any]:
    """Return the first line that a mutant changes, and the changed lines before and after."""
    old = before.splitlines()
    new = after.splitlines()
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    blocks = [block for block in matcher.get_opcodes() if block[0] != "equal"]
    return {
        "line": blocks[0][1] + 1,
        "before": " ".join(line.strip() for _, a, b, _, _ in blocks for line in old[a:b]),
        "after": " ".join(line.strip() for _, _, _, a, b in blocks for line in new[a:b]),
    }


@dataclass
class Job:
    name: Any
    action: Callable[[Path], object]
    limit_s: float
    folder: Path = Path()
    start_s: float = 0.0


def in_forks(jobs: Iterable[Job], number: int, end_s: float) -> Iterator[tuple[Any, int | None, dict[str, Any], float]]:
    """Run each job in a forked process: its name, exit status (None: out of time), what it found, and seconds.

    What has not finished at the end is stopped, and not reported.
    """
    waiting = iter(jobs)
    running = dict[int, Job]()
    while True:
        while len(running) < number and time.monotonic() < end_s and (job := next(waiting, None)):
            job.folder = Path(tempfile.mkdtemp(prefix="mutant-"))
            job.start_s = time.monotonic()
            sys.stdout.flush()
            if not (child := os.fork()):
                _run_child(job)
            running[child] = job
        if not running:
            return
        time.sleep(0.02)
        for child, job in list(running.items()):
            now_s = time.monotonic()
            done, status = os.waitpid(child, os.WNOHANG)
            if not done and now_s < min(job.start_s + job.limit_s, end_s):
                continue
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            if not done:
                os.waitpid(child, 0)
            found = job.folder / FOUND
            content = json.loads(found.read_text()) if found.exists() else {}
            code = os.waitstatus_to_exitcode(status) if done else None
            if code == INTERNAL:
                raise RuntimeError((job.folder / "log").read_text())
            shutil.rmtree(job.folder, ignore_errors=True)
            del running[child]
            if done or now_s < end_s:
                yield job.name, code, content, now_s - job.start_s


def _run_child(job: Job) -> None:
    os.setpgid(0, 0)
    log = os.open(job.folder / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = INTERNAL
    try:
        code = int(job.action(job.folder) or 0)  # type: ignore[call-overload]
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def coverage_of(files: list[str], tests: list[str], jobs: int, end_s: float) -> dict[str, Any]:
    """Lines by test and seconds of each test. What was found of a test file is kept until it or a source changes."""
    cases = [path for test in tests for path in _python_files(test, "test_*.py")]
    shared = [path for path in _python_files("tests") if not path.name.startswith("test_") and path != Path(__file__)]
    sources = sorted({str(ROOT / Path(file).parent) for file in files})
    digest = hashlib.sha256(repr(sources).encode())
    for path in (*_python_files("nestrec"), *shared):
        digest.update(path.read_bytes())
    kept = {
        path: CACHE / f"{_digest(path)}-{digest.hexdigest()[:16]}-{'-'.join(path.parts[-2:])}.json" for path in cases
    }
    new = [path for path in cases if not kept[path].exists()]
    CACHE.mkdir(parents=True, exist_ok=True)
    work = [Job(path, functools.partial(cover, str(path.relative_to(ROOT)), sources), 600.0) for path in new]
    for path, _, found, seconds in in_forks(work, jobs, end_s):
        print(f"{path.relative_to(ROOT)}: {seconds:.0f} s, {len(found['failed'])} failed", flush=True)
        kept[path].write_text(json.dumps(found))
    merged: dict[str, Any] = {"lines": defaultdict(lambda: defaultdict(list)), "seconds": {}, "failed": []}
    for path in cases:
        if not kept[path].exists():
            raise SystemExit(f"the coverage of {path} is not known: give it more --minutes")
        found = json.loads(kept[path].read_text())
        for file, lines in found["lines"].items():
            for line, names in lines.items():
                merged["lines"][file][line] += names
        merged["seconds"] |= found["seconds"]
        merged["failed"] += found["failed"]
    return merged


def tests_of(mutant: Mutant, covered: dict[str, Any]) -> tuple[list[str], float]:
    """Return tests that execute the mutated lines, of every file the shortest, and their seconds."""
    by_line = covered["lines"].get(mutant.file, {})
    # Coverage does not see lines of compiled loops: there, all tests of the module count.
    lines = by_line if mutant.is_compiled else map(str, mutant.lines)
    names = {name for line in lines for name in by_line.get(line, [])}
    seconds = {t: s for t, s in covered["seconds"].items() if t in names or t.partition("::")[0] in names}
    cases: Counter[str] = Counter()
    turns: Counter[str] = Counter()
    ranked = []
    for test in sorted(seconds, key=lambda test: (seconds[test], test)):
        function, file = test.partition("[")[0], test.partition("::")[0]
        cases[function] += 1
        if cases[function] <= MOST_CASES:
            turns[file] += 1
            ranked.append((turns[file], seconds[test], test))
    chosen: dict[str, list[str]] = defaultdict(list)
    total_s = 0.0
    for _, test_s, test in sorted(ranked):
        if total_s + test_s <= MOST_SECONDS_OF_TESTS or not chosen:
            chosen[test.partition("::")[0]].append(test)
            total_s += test_s
    order = sorted(chosen.values(), key=lambda tests: sum(seconds[test] for test in tests))
    return [test for tests in order for test in tests], total_s


def _python_files(name: str, pattern: str = "*.py") -> list[Path]:
    path = ROOT / name
    return [path] if path.is_file() else sorted(path.rglob(pattern))


def sampled(folders: list[str], number: int, seed: int) -> tuple[dict[str, list[Mutant]], dict[str, MutantsOfFile]]:
    """Choose the mutants to try of each folder, in random order; also return the modules by file."""
    chosen, modules = {}, {}
    for folder in folders:
        files = [str(path.relative_to(ROOT)) for path in _python_files(folder)]
        modules |= {file: MutantsOfFile(file) for file in files}
        every = [mutant for file in files for mutant in modules[file].found]
        chosen[folder] = random.Random(seed).sample(every, min(number or len(every), len(every)))
        print(f"{folder}: {len(every)} mutants, {len(chosen[folder])} of them are tried", flush=True)
    return chosen, modules


class Results:
    """FILE and the list of survivors, written every few seconds: of the other mutants it contains the numbers alone."""

    def __init__(self, path: Path, chosen: dict[str, list[Mutant]], modules: dict[str, MutantsOfFile]) -> None:
        self._path = path
        self._chosen = chosen
        self._modules = modules
        self._written_s = 0.0
        # Another version of this script may number the mutants in another way.
        self._digests = {file: _digest(ROOT / file, Path(__file__)) for file in modules}
        known = json.loads(path.read_text()) if path.exists() else {"rows": [], "files": {}, "survivors": {}}
        self._why = {(r["before"], r["after"]): r["why"] for r in known["survivors"].values() if "why" in r}
        self._other_rows = [row for row in known["rows"] if row["folder"] not in chosen]
        self._files = {
            f: found for f, found in known["files"].items() if self._digests.get(f, "") in ("", found["digest"])
        }
        self.survivors = {name: r for name, r in known["survivors"].items() if name.partition("#")[0] in self._files}
        self.status = {
            f"{file}#{number}": status
            for file, found in self._files.items()
            for status in STATUSES
            for number in found.get(status, "").split()
        }

    def add(self, mutant: Mutant, status: str, row: dict[str, Any]) -> None:
        self.status[mutant.name] = status
        self.survivors.pop(mutant.name, None)
        if status in SURVIVES:
            why = self._why.get((row["before"], row["after"]))
            self.survivors[mutant.name] = row | ({"why": why} if why else {})
        if time.monotonic() > self._written_s + 5:
            self.write()

    def write(self) -> None:
        make_frame = result_files().make_frame

        rows = list(self._other_rows)
        for folder, mutants in self._chosen.items():
            counts = Counter(self.status[m.name] for m in mutants if m.name in self.status)
            tried = counts.total()
            row = {"folder": folder, "mutants": self._num_mutants(folder), "tried": tried}
            score = round((counts["killed"] + counts["timeout"]) / tried, 4) if tried else None
            rows.append(row | {status: counts[status] for status in STATUSES} | {"score": score})
        files = {file: {"digest": found["digest"]} for file, found in self._files.items()}
        files |= {file: {"digest": digest} for file, digest in self._digests.items()}
        for name, status in self.status.items():
            file, _, number = name.partition("#")
            files[file][status] = f"{files[file].get(status, '')} {number}".strip()
        words = [self._path.name if word == str(self._path) else word for word in sys.argv[1:]]
        command = " ".join(["python", "tests/mutants.py", *words])
        frame = make_frame(bench="mutants", command=command, rows=rows)
        frame |= {"files": files, "survivors": dict(sorted(self.survivors.items()))}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        texts = {self._path: json.dumps(frame, indent=1), self._path.with_suffix(".md"): self._page(rows)}
        for path, text in texts.items():
            partial = path.with_name(path.name + ".partial")
            partial.write_text(text + "\n")
            partial.rename(path)
        self._written_s = time.monotonic()

    def _num_mutants(self, folder: str) -> int:
        return sum(
            len(m.found) for file, m in self._modules.items() if Path(folder) in (Path(file), *Path(file).parents)
        )

    def _page(self, rows: list[dict[str, Any]]) -> str:
        lines = ["# Mutants that no test detects", ""]
        lines += ["- " + ", ".join(f"{name}: {value}" for name, value in row.items()) for row in rows]
        for row in sorted(self.survivors.values(), key=lambda row: (row["file"], row["line"], row["after"])):
            tests = f"{row['tests']} tests" if row["tests"] else "no test"
            lines += ["", f"`{row['file']}:{row['line']}` in `{row['function']}` ({tests})", ""]
            lines += ["```diff", f"- {row['before']}", f"+ {row['after']}", "```"]
            lines += ["", row["why"]] if "why" in row else []
        return "\n".join(lines)


def status_of(tests: list[str], code: int | None) -> str:
    if not tests:
        return "untested"
    if code is None:
        return "timeout"
    return "killed" if code else "survived"


def _module_name(file: str) -> str:
    return file.removesuffix(".py").replace("/", ".")


def _digest(*paths: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folders", nargs="+", required=True, help="folders or files of nestrec to mutate")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="folders or files of tests")
    parser.add_argument("--sample", type=int, default=0, help="mutants to try of each folder; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--minutes", type=float, default=1e9, help="what is not tried by then is left for the next run")
    parser.add_argument("--again", action="store_true", help="try the survivors in FILE again")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON file of the results")
    given = parser.parse_args()
    end_s = time.monotonic() + 60 * given.minutes
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    # Without a GPU: the parent must not initialize CUDA before it forks.
    os.environ |= {"OMP_NUM_THREADS": "1", "COVERAGE_CORE": "ctrace", "CUDA_VISIBLE_DEVICES": ""}
    chosen, modules = sampled(given.folders, given.sample, given.seed)
    for name in SHARED:
        importlib.import_module(name)
    early = {_module_name(file) for file in modules} & set(sys.modules)
    assert not early, f"imported too early to be mutated: {early}"
    covered = coverage_of(sorted(modules), given.tests, given.jobs, end_s)
    print(f"{len(covered['seconds'])} tests pass, left out are {covered['failed']}", flush=True)
    results = Results(given.output, chosen, modules)
    jobs = []
    # One mutant of each folder after the other: a run that is cut short has tried a sample of each.
    for mutant in (m for several in itertools.zip_longest(*chosen.values()) for m in several if m is not None):
        known = results.status.get(mutant.name)
        if known is not None and not (given.again and known in SURVIVES):
            continue
        tests, seconds = tests_of(mutant, covered)
        limit_s = 10 + 5 * max((covered["seconds"][test] for test in tests), default=0.0)
        action = functools.partial(judge, mutant, modules[mutant.file], tests, limit_s)
        jobs.append(Job((mutant, tests), action, 60 + 4 * seconds))
    for (mutant, tests), code, found, seconds in in_forks(jobs, given.jobs, end_s):
        status = status_of(tests, code)
        row = {"file": mutant.file, "function": mutant.function, "tests": len(tests), **found}
        results.add(mutant, status, row)
        print(f"{status}: {mutant.file}:{found['line']} {found['after']} ({seconds:.0f} s)", flush=True)
    results.write()


if __name__ == "__main__":
    main()
