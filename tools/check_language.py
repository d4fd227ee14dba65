#!/usr/bin/env python3
"""Checks the prose and the names of a repository against its style guide. Needs Python 3.11 and git.

    check_language.py                       check every Python and Markdown file below the current folder
    check_language.py . --changed main      check only the lines and commits added since a git revision
    check_language.py . --json              print counts per rule and per folder

Prints each finding as `path:line: rule: found -> suggestion`; the exit status is 1 if there are findings.
Exceptions are listed in `.language-allow` (one `RULE GLOB TEXT` per line), or marked with `# language: allow RULE`.
"""

import argparse
import ast
import fnmatch
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROSE = ("docstring", "field doc", "comment", "error", "problem", "help", "log", "markdown")
VARIABLES = ("identifier", "function", "class")
NAMES = (*VARIABLES, "test name")


@dataclass(frozen=True)
class Text:
    """A piece of prose, a name or a statement, with its position in the repository."""

    kind: str
    value: str
    path: str = ""
    line: int = 0
    end_line: int = 0
    owner: str = ""  # of a docstring: module, class, function, property or test


@dataclass(frozen=True, order=True)
class Finding:
    """A violation of the style guide, and what to write instead."""

    path: str
    line: int
    rule: str
    found: str
    suggestion: str

    def __str__(self) -> str:
        position = f"{self.path}:{self.line}" if self.line else self.path
        return f"{position}: {self.rule}: {self.found} -> {self.suggestion}"


Hits = Iterator[tuple[int, int, str]]  # start, end, suggestion
Check = Callable[[Text], Hits]


@dataclass(frozen=True)
class Rule:
    """A rule; `before` and `after` are printed as its example, and tested by `--selftest`."""

    name: str
    why: str
    before: str
    after: str
    kinds: tuple[str, ...]
    check: Check


def phrase(pattern: str, suggestion: str, unless_after: str = "(?!)") -> Check:
    """Returns a check that reports matches of a pattern, unless certain words come before them."""
    wanted = re.compile(pattern.replace(" ", r"\s+"), re.IGNORECASE)
    excused = re.compile(rf"\b(?:{unless_after})\W*$".replace(" ", r"\s+"), re.IGNORECASE)

    def check(text: Text) -> Hits:
        for match in wanted.finditer(text.value):
            if not excused.search(text.value, max(0, match.start() - 60), match.start()):
                yield match.start(), match.end(), suggestion

    return check


def any_of(*checks: Check) -> Check:
    return lambda text: (hit for check in checks for hit in check(text))


def name_with(word: str) -> str:
    """Returns a pattern for identifiers that contain a word, such as `kept_pages` and `KeptPages`."""
    return rf"(?-i:\w*((?<![A-Za-z])({word}|{word.upper()})|{word.capitalize()})(?![a-z])\w*)"


FINITE_VERB = re.compile(
    r"\b(is|are|was|were|has|have|had|must|may|can|cannot|could|will|would|does|do|did|should|needs?|comes?|goes|gets?"
    r"|stays?|keeps?|takes?|took|ends?|begins?|starts?|becomes?|belongs?|runs?|waits?|reads?|writes?|raises?|returns?"
    r"|gives?|makes?|holds?|counts|costs|fails?|remains?|moves?|works?|leaves?|follows?)\b"
)
RELATIVE = re.compile(r"\b(that|which|who|whom|whose|what|where|when|if|as|by|whether)\b", re.IGNORECASE)
HEADLESS = re.compile(r"(Of|The same|As|What|Whose|Who|Whom|Where|Which|How)\b")
DETERMINER = re.compile(r"(The|An?|All|One|Every|Each|Its|Their|Th[eo]se|Some|Any|Both|Two|Another|Whether|No)\b|\(")
NOUN_OF = re.compile(r"(?!(Check|Ensure|Assert|Verif|Require|Return|Dispose|None)\w* )[A-Z][a-z-]+ (of|that|which)\b")
FIRST_CLAUSE = re.compile(r"\s*(.*?)\s*([.;:](\s|$)|$)", re.DOTALL)


def headless(text: Text) -> Hits:
    """Reports a first clause without a main verb, such as "Of this rank." or "What is read of a user."."""
    clause = FIRST_CLAUSE.match(text.value)[1]
    match = HEADLESS.match(clause)
    if match is None:
        return
    num_verbs = len(FINITE_VERB.findall(clause))
    if match[1] in ("Of", "The same"):
        is_sentence = num_verbs > 0 and not RELATIVE.search(clause)
    else:
        is_sentence = num_verbs > 1 or ("," in clause and num_verbs > 0)
    if not is_sentence:
        yield 0, len(clause), "name the thing, or start with a verb"


def noun_summary(text: Text) -> Hits:
    """Reports a function whose summary is a noun phrase; properties and fixtures may have one."""
    clause = FIRST_CLAUSE.match(text.value)[1]
    if text.owner != "function" or HEADLESS.match(clause):
        return
    if NOUN_OF.match(clause) or (DETERMINER.match(clause) and not FINITE_VERB.search(RELATIVE.split(clause)[0])):
        yield 0, len(clause), "start with a verb: Returns ..."


IZE = """optim normal initial serial synchron summar organ recogn quant vector parallel minim maxim util special
    general token material custom real random memor categor standard penal regular final factor local canonical"""
BRITISH = {
    "catalogue": "catalog", "licence": "license", "analyse": "analyze", "artefact": "artifact", "defence": "defense",
    "judgement": "judgment", "labell": "label", "modell": "model", "signall": "signal", "grey": "gray",
    "centring": "centering", "centred": "centered", "centre": "center", "learnt": "learned", "fulfils": "fulfills",
    **{f"{stem}our": f"{stem}or" for stem in ("col", "behavi", "neighb", "fav", "hon", "lab", "flav")},
    **{f"{stem}is{end}": f"{stem}iz{end}" for stem in IZE.split() for end in ("e", "ing", "ation", "able")},
}  # fmt: skip
BRITISH_STEM = re.compile("|".join(BRITISH), re.IGNORECASE)


def british(text: Text) -> Hits:
    for match in BRITISH_STEM.finditer(text.value):
        start = re.search(r"\w*$", text.value[: match.start()]).start()
        end = re.compile(r"\w*").match(text.value, match.end()).end()
        american = BRITISH[match[0].lower()]
        yield start, end, text.value[start:end].replace(match[0], american.title() if match[0].istitle() else american)


CALLER = "the caller, client, process or thread"
PERSON = (
    "users?|people|persons?|operators?|engineers?|developers?|authors?|customers?|administrators?|anyone|someone"
    "|everyone|contributors?|reviewers?|maintainers?|teams?|humans?|attackers?|of|on|let only those ask"
)
CONDITION = "is|are|was|were|has|have|had|does|do|did|will|would|can|cannot|may|needs?|exists?|allows?|fits?"
LOCATED = "stored|kept|written|placed|put|found|located|defined|declared|called|used|computed|created|read|running"
LOCATION = (  # words before a "where" that is not a condition
    "and|or|by|to|from|of|says?|tells?|told|shows?|knows?|see|places?|folder|file|point|line|left|stays?|stayed|goes|go"
    "|on|cut|finds?|names?|about|what|just|exactly|position|machine|step|there|asks?|look|begins?|ends?"
)
COMPARATIVE = "longer|more|less|fewer|better|worse|later|earlier|sooner|greater|larger|smaller|faster|slower|different"
NO_INDEX = "in|takes?|taken|took|taking|decimal|one|first|last|to|third|right|wrong|same|other|in (the|their|its)"
SERVER = "proxy|haproxy|map|gateway|cache|load|nginx|ray|balancer|firewall|fronts?|computation|link|interface"
LEFT_BEHIND = r"(lag|lags|lagging|falls?|falling|fell|left|leaves?|far|further|hid\w*|instances)( \W*\w+){0,4}"
FIRST_WORD = (
    "an?|the|what(ever)?|where(ver)?|who(ever|se)?|nobody|every|each|all(?!_(to_all|reduce|gather))|no|one|some|of|as|how|"
    "when|if|it|that"
)
PARTICIPLE = (
    "(?!(Bed|Red|Seed|Feed|Speed|Shed|Embed|Jagged|Nested)$)([A-Z][a-z]+ed|Told|Said|Kept|Given|Begun|Made|Lent|Found"
    "|Left|Taken|Written|Read|Held|Sent|Met|Chosen|Known|Shown|Drawn|Broken|Lost|Built|Bound|Come|Gone|Seen)"
)
SCOPE = r"(?-i:[a-z][\w./, -]*(\([^)]*\))?!?: )"
WORDS = [  # rule, pattern, suggestion, before, after
    ("anew", r"\banew\b", "again", "read anew", "read again"),
    ("to-the-bit", r"\bto the bit\b", "bitwise", "equal to the bit", "bitwise identical"),
    ("go-on", r"\b(goes|go|going|went|gone) on\b", "continue, resume", "The run goes on.", "The run continues."),
    ("mend", r"\bmend(s|ed|ing)?\b", "fix, repair", "A reload mends it.", "A reload fixes it."),
    ("beside", r"\bbeside\b", "next to, with, during", "beside the file", "next to the file"),
    ("give-back", r"\bg[ia]v(e|es|en|ing)( \w+){0,3} back\b", "return, release", "gives it back", "releases it"),
    ("be-had", r"\b(be|been) had\b", "available", "It is not to be had.", "It is not available."),
    ("its-making", r"\b(its|their|own) making\b", "creation", "from its making on", "after its creation"),
]
RULES = [
    *(Rule(name, f"The usual words are: {words}.", *example, PROSE, phrase(pattern, words))
      for name, pattern, words, *example in WORDS),
    Rule("headless-docstring", "A summary is a sentence, or a noun phrase that names the thing.",
         "What is kept of a user.", "Cached keys and values of a user.", ("docstring",), headless),
    Rule("noun-summary", "A function does something, so its summary starts with a verb; a property may be a noun.",
         "The rows of a table.", "Checks that rows are sorted.", ("docstring",), noun_summary),
    Rule("field-doc-fragment", "The description of a field is also printed without its name.",
         "of its body; 0 where nobody knows", "Bytes of the request body; 0 if unknown.", ("field doc",),
         phrase(r"\A(?-i:(from|for|in|by|with|to|at|on) which|of|as|where|that|whose|when|what|how|who|by whom)\b",
                "a phrase that is complete without the name of the field")),
    Rule("is-no", "English negates the verb.", "It is no name.", "It is not a name; there is no such name.", PROSE,
         any_of(phrase(rf"\b(is|are|was|were|be|been) no (?!{COMPARATIVE})\w+", "is not, does not", "there|there to"),
                phrase(r"\b(has|have|had) no \w+ that\b", "does not have a ... that"))),
    Rule("person-for-program", "Programs, threads and requests are not people.",
         "0: nobody waits for it", "0: no thread waits for it; users who wait", PROSE,
         any_of(phrase(r"\b(nobody(?!'s)|somebody|whoever)\b", CALLER), phrase(r"\bwhom?\b", CALLER, PERSON))),
    Rule("say-tell", "Options set, responses contain, tables list, commands print; none of them talks.",
         "The option says how often.", "The option sets how often.", PROSE,
         phrase(r"\b((told|tells?|telling)\b(?! apart|:)|(said|says?|saying)\b(?!,| (more|less|nothing) about))",
                "report, return, list, contain, set, print", "to|i|we|you")),
    Rule("where-for-if", "'Where' is for places; conditions take 'if' or 'when'.",
         "0 where there is none", "0 if there is none; the folder where it is stored", PROSE,
         any_of(phrase(r"\bwhere (there|no|none|nothing|nobody|not|needed|possible|one is|any|more|fewer|less|several"
                       r"|something)\b", "if, when"),
                phrase(rf"(?!\A)\bwhere ((?:it|they|that|this|one)|(?:the|an?|all|its|every|some)( \w+){{1,3}}?)"
                       rf" ({CONDITION}) (?!{LOCATED})\w+", "if, when", LOCATION),
                phrase(r"(?-i:\bWhere) (?!to\b|from\b|it\b|they\b|each\b)[^.?:;,|]*, ", "If, When"))),
    Rule("so-many", "Name the number or the option.", "after so many steps", "after N steps, so many that ...", PROSE,
         phrase(r"\bso (many|long|often|much|few)\b(?! as\b|( \w+){0,4} that\b)", "N, the option", "not|ever")),
    Rule("stand-lie", "Text is listed or printed; data is stored.",
         "The key stands in the log.", "The key is printed in the log.", PROSE,
         phrase(r"\b(stands?|stood|standing|lies|lie|lay|lying) (in(?! for| where| place)|at|on|under|beside|behind"
                r"|before|there|here|with|among|after)\b", "is stored, is listed, is printed, is")),
    Rule("behind", "'Behind' is a place, not an order.", "zeros behind row N", "zeros after it; behind a proxy", PROSE,
         phrase(rf"\bbehind\b(?!\W+(an?|the|its)?\W*(\w+ )?({SERVER})\b)", "after, later, below", LEFT_BEHIND)),
    Rule("place-for-index", "The standard terms are index, position and slot; for files: location, storage.",
         "The places of these keys.", "The indices of these keys, in place.", PROSE,
         phrase(r"\bplaces?\b(?! (an?|the|where|it|them|on)\b)", "index, position, slot, location", NO_INDEX)),
    Rule("place-name", "A name says what it is: an index, a position, an offset, a slot, a path or a storage.",
         "key_places", "key_indices", VARIABLES, phrase(name_with("places?"), "index, position, slot, storage")),
    Rule("kept-name", "The standard terms are cached and retained.", "KeptPages", "CachedPages", VARIABLES,
         phrase(r"(?-i:\A(_*(Kept|KEPT|kept_)\w*|_+kept)\Z|\w+_kept_\w+)", "cached, retained")),
    Rule("whole-name", "Name the state of the value.", "whole", "gathered", VARIABLES,
         phrase(name_with("whole"), "full, complete, gathered, unsharded, to_float32")),
    Rule("participle-class", "A class is a thing, so its name is a noun.", "Told", "Report", ("class",),
         phrase(rf"(?-i:\A_*{PARTICIPLE}\Z)", "a noun for what an instance is")),
    Rule("british-spelling", "American spelling, as in PyTorch.", "row optimiser", "precise row optimizer",
         (*PROSE, *NAMES), british),
    Rule("test-name", "Tests are found with `pytest -k`: test_<subject>_<behavior>, at most 60 characters.",
         "test_what_is_kept_is_found", "test_prefix_cache_returns_cached_user", ("test name",),
         any_of(phrase(r"\A.{61,}\Z", "test_<subject>_<behavior>, at most 60 characters"),
                phrase(rf"\A(?=.{{,60}}\Z)test_({FIRST_WORD})_\w+", "test_<subject>_<behavior>, the subject first"))),
    Rule("packed-assignment", "Diffs and breakpoints work by line.", "self.a, self.b = x, y", "self.a = x; i, j = 0, 0",
         ("packed assignment",), phrase(r"\A[^\n]+", "one assignment per line")),
    Rule("chained-ternary", "A chain of conditions is an if statement.", "x if a else y if b else z", "x if a else y",
         ("chained ternary",), phrase(r"\A[^\n]+", "if statements, or a function with returns")),
    Rule("error-predicate", "An error is a sentence that can be read without 'FIELD = VALUE:' before it.",
         "is no known cluster", "unknown cluster", ("problem",),
         phrase(r"\A((is|are) (no|none|nothing|to be|not to be)|says?|said|stands?|lies|tells?|has no)\b",
                "a sentence: what was expected, and what to do")),
    Rule("commit-subject", "Subjects are read in a list: scope, imperative verb, at most 72 characters.",
         "What fewer bits cost", "serving: measure the cost of quantized prefixes", ("commit",),
         any_of(phrase(r"\A.{73,}\Z", "at most 72 characters"),
                phrase(rf"\A(?!{SCOPE}).{{,72}}\Z", "scope: imperative verb ..."),
                phrase(rf"\A{SCOPE}(\w+(ed|ing|[^s]s)|the|an?|what|no|of|how|one|all)\b", "an imperative verb"))),
]  # fmt: skip


CODE = r"``[^`]+``|`[^`]+`|https?://\S+"
ERROR_CALL = re.compile(r"(Error|Exception|Exit|Misfit)$")
ERROR_VARIABLES = {"remedy": "error", "message": "error", "reason": "error", "problem": "problem"}
LOG_CALLS = {"info", "warning", "error", "debug", "exception", "critical", "warn", "echo", "secho", "print"}


def blank(pattern: str, source: str, filler: str = "_", flags: int = 0) -> str:
    """Returns the source with each match overwritten; line breaks stay, so positions stay."""
    return re.sub(pattern, lambda match: re.sub(r"[^\n]", filler, match[0]), source, flags=flags)


def is_packed(node: ast.Assign) -> bool:
    """Returns whether `a, b = x, y` is not a swap, and does not assign several values of one kind."""
    targets, used = (
        {ast.unparse(part) for part in ast.walk(side) if isinstance(part, ast.Name | ast.Attribute)} - {"self"}
        for side in (node.targets[0], node.value)
    )
    kinds = {
        type(value.value) if isinstance(value, ast.Constant) else re.split(r"[(\[{]", ast.unparse(value))[0]
        for value in node.value.elts
    }
    return len(kinds) > 1 and not targets & used


class PythonTexts:
    """Collects the texts of a Python file in `texts`."""

    def __init__(self, path: str, source: str) -> None:
        self.texts: list[Text] = []
        self._path = path
        self._seen: set[int | str] = set()  # ids of string nodes, and values
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            self._visit(node)
            if isinstance(node, ast.Constant) and "#" in str(node.value):
                for number in range(node.lineno - 1, node.end_lineno):
                    end = node.end_col_offset if number == node.end_lineno - 1 else len(lines[number])
                    lines[number] = lines[number][:end].replace("#", "_") + lines[number][end:]
        for number, line in enumerate(lines, 1):
            if "#" in line:
                self._add("comment", line.partition("#")[2].strip(), ast.Pass(lineno=number, end_lineno=number))

    def _add(self, kind: str, value: str, node: ast.AST, owner: str = "") -> None:
        """Adds a text without its quoted code; a name only once per file."""
        if kind not in NAMES or value not in self._seen:
            self.texts.append(Text(kind, blank(CODE, value), self._path, node.lineno, node.end_lineno, owner))
            self._seen.add(value)

    def _strings(self, kind: str, node: ast.AST) -> None:
        """Adds the strings below a node; what an f-string inserts becomes an underscore."""
        for child in ast.walk(node):
            parts = child.values if isinstance(child, ast.JoinedStr) else [child]
            value = "".join(str(part.value) if isinstance(part, ast.Constant) else "_" for part in parts)
            if isinstance(child, ast.JoinedStr | ast.Constant) and " " in value and id(child) not in self._seen:
                self._seen.update(id(part) for part in (child, *parts))
                self._add(kind, value, child)

    def _docs(self, body: list[ast.stmt], owner: str, kind: str = "docstring") -> None:
        """Adds the docstring of a body, and each string that describes the assignment before it."""
        for before, statement in zip([None, *body], body, strict=False):
            value = statement.value if isinstance(statement, ast.Expr) else None
            is_text = isinstance(value, ast.Constant) and isinstance(value.value, str)
            if is_text and (before is None or isinstance(before, ast.AnnAssign | ast.Assign)):
                self._add("field doc" if before else kind, value.value, value, owner)

    def _visit(self, node: ast.AST) -> None:
        match node:
            case ast.Module():
                self._docs(node.body, "module")
            case ast.ClassDef():
                self._add("class", node.name, node)
                self._docs(node.body, "class")
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._function(node)
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                self._add("identifier", name, node)
            case ast.Call():
                self._call(node)
            case ast.Assign(targets=[ast.Name(id=name)]) if name in ERROR_VARIABLES:
                self._strings(ERROR_VARIABLES[name], node.value)
            case ast.Assign(targets=[ast.Tuple()], value=ast.Tuple()) if is_packed(node):
                self._add("packed assignment", ast.unparse(node), node)
            case ast.IfExp(body=ast.IfExp()) | ast.IfExp(orelse=ast.IfExp()):
                self._add("chained ternary", ast.unparse(node), node)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
        owner = "property" if re.search(r"property|\.getter|fixture", decorators) else "function"
        owner = "test" if node.name.startswith("test_") else owner
        self._add("test name" if owner == "test" else "function", node.name, node)
        self._docs(node.body, owner, "help" if re.search(r"\.(command|callback)\(", decorators) else "docstring")

    def _call(self, node: ast.Call) -> None:
        name = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
        if ERROR_CALL.search(name):
            if node.args and any(keyword.arg in ("field", "option") for keyword in node.keywords):
                self._strings("problem", node.args[0])
            self._strings("error", node)
        elif name in ("require", "add") and any(keyword.arg in ("option", "remedy") for keyword in node.keywords):
            for problem in node.args[name == "require" :][:1]:
                self._strings("problem", problem)
            self._strings("error", node)
        elif name in LOG_CALLS:
            self._strings("log", node)
        for keyword in node.keywords:
            if keyword.arg in ("help", "epilog", "short_help"):
                self._strings("help", keyword.value)


def markdown_texts(path: str, source: str) -> Iterator[Text]:
    """Yields the paragraphs of a Markdown file without code, HTML and link targets."""
    source = blank(r"^(```|~~~).*?^\1|<!--.*?-->|<[^>\n]+>", source, " ", re.MULTILINE | re.DOTALL)
    source = blank(rf"(?<=\])\([^)\s]*\)|{CODE}", source)
    line = 1
    for paragraph in re.split(r"(\n\s*\n)", source):
        yield Text("markdown", paragraph, path, line, line + paragraph.count("\n"))
        line += paragraph.count("\n")


def git(root: Path, *arguments: str) -> list[str]:
    """Returns the lines that a git command prints."""
    command = ["git", "-C", str(root), "-c", "core.quotePath=false", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {result.stderr.strip()}")
    return result.stdout.splitlines()


def added_lines(root: Path, base: str) -> dict[str, set[int]]:
    """Returns the numbers of the lines added to each file since a revision, untracked files included."""
    lines: dict[str, set[int]] = defaultdict(set)
    path = ""
    for row in git(root, "diff", "-U0", "--no-color", "--no-ext-diff", "--relative", base, "--", "*.py", "*.md"):
        if row.startswith("+++ "):
            path = row[len("+++ b/") :]
        elif match := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", row):
            lines[path].update(range(int(match[1]), int(match[1]) + int(match[2] or 1)))
    untracked = git(root, "ls-files", "--others", "--exclude-standard", "--", "*.py", "*.md")
    return lines | {path: set(range(1, 100_000)) for path in untracked}


def line_of(text: Text, start: int, lines: list[str]) -> int:
    """Returns the line of a match; in a string of several literals, the first line with the matched words."""
    num_breaks = text.value.count("\n", 0, start)
    beginning = text.value[start : start + 12].split("\n")[0]
    if start and not num_breaks:
        for number, line in enumerate(lines[text.line - 1 : text.end_line], text.line):
            if beginning in line:
                return number
    return text.line + num_breaks


def findings_of(text: Text, lines: list[str], rules: list[Rule]) -> Iterator[Finding]:
    """Yields the findings in a text, without those that its first, last or matched line allows."""
    for rule in rules:
        for start, end, suggestion in rule.check(text) if text.kind in rule.kinds else ():
            line = line_of(text, start, lines)
            marks = [lines[number - 1] for number in {line, text.line, text.end_line} if 0 < number <= len(lines)]
            if not any(re.search(rf"language: allow\b.*\b{rule.name}\b", mark) for mark in marks):
                found = " ".join(text.value[start:end].split())
                yield Finding(text.path, line, rule.name, found if len(found) <= 70 else found[:67] + "...", suggestion)


def check_file(root: Path, path: str, rules: list[Rule]) -> list[Finding]:
    source = (root / path).read_text(encoding="utf-8", errors="replace")
    texts = PythonTexts(path, source).texts if path.endswith(".py") else markdown_texts(path, source)
    lines = source.splitlines()
    return [finding for text in texts for finding in findings_of(text, lines, rules)]


def check(root: Path, rules: list[Rule], base: str | None = None) -> list[Finding]:
    """Returns the findings of a tree, or of what was added since `base`, in order of path and line."""
    added = added_lines(root, base) if base else {}
    listed = git(root, "ls-files", "--cached", "--others", "--exclude-standard", "--", "*.py", "*.md")
    findings: set[Finding] = set()
    for path in filter(lambda path: (root / path).is_file(), added if base else listed):
        with suppress(SyntaxError):  # linters report it better
            findings.update(f for f in check_file(root, path, rules) if not base or f.line in added[path])
    for row in git(root, "log", "--no-merges", "--format=%h %s", f"{base}..HEAD") if base else ():
        commit, subject = row.split(" ", 1)
        findings.update(findings_of(Text("commit", subject, f"commit {commit}"), [], rules))
    file = root / ".language-allow"
    for row in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        rule, glob, text = (*row.split(maxsplit=2), "*", "*", "*")[:3]
        findings -= {f for f in findings if f.rule == rule and fnmatch.fnmatch(f.path, glob) and text in (f.found, "*")}
    return sorted(findings)


def counts(findings: list[Finding], rules: list[Rule]) -> dict[str, object]:
    """Returns the counts for `--json`: per rule over all files, and per folder at most two levels deep."""
    totals = {rule.name: 0 for rule in rules if rule.kinds != ("commit",)} | Counter(f.rule for f in findings)
    folders: dict[str, Counter[str]] = defaultdict(Counter)
    for finding in findings:
        folders["/".join(finding.path.split("/")[:-1][:2]) or "."][finding.rule] += 1
    return {"findings": len(findings), "totals": totals, "folders": dict(sorted(folders.items()))}


def spread(findings: list[Finding], limit: int) -> list[Finding]:
    """Returns at most `limit` findings, taken from the rules in turn, in their order."""
    by_rule: dict[str, list[Finding]] = defaultdict(list)
    for finding in findings:
        by_rule[finding.rule].append(finding)
    turns = sorted((turn, finding) for found in by_rule.values() for turn, finding in enumerate(found))
    return sorted(finding for _, finding in turns[:limit])


def selftest() -> int:
    """Checks that each rule reports its `before` and not its `after`; returns the number of failures."""
    failures = []
    for rule in RULES:
        for value, expected in ((rule.before, True), (rule.after, False)):
            is_code = rule.kinds[0] in ("packed assignment", "chained ternary")
            texts = PythonTexts("", value).texts if is_code else [Text(rule.kinds[0], value, owner="function")]
            if any(list(findings_of(text, [], [rule])) for text in texts) != expected:
                failures.append(f"{rule.name}: {value!r}")
    print(*failures, f"{2 * len(RULES)} cases, {len(failures)} failures", sep="\n")
    return len(failures)


def main() -> int:
    names = [rule.name for rule in RULES]
    parser = argparse.ArgumentParser(description="Check prose and names against the style guide.")
    parser.add_argument("root", nargs="?", default=".", type=Path, help="Root of the repository (default: .).")
    parser.add_argument("--changed", metavar="BASE", help="Check only lines and commits added since a git revision.")
    parser.add_argument("--json", action="store_true", help="Print counts per rule and folder.")
    parser.add_argument("--rule", nargs="+", choices=names, metavar="NAME", help="Check these rules (default: all).")
    parser.add_argument("--explain", choices=names, metavar="RULE", help="Explain a rule.")
    parser.add_argument("--list", action="store_true", help="List the rules.")
    parser.add_argument("--max", type=int, metavar="N", help="Print at most N findings (default with --changed: 24).")
    parser.add_argument("--selftest", action="store_true", help="Check the rules on their examples.")
    options = parser.parse_args()
    if options.selftest:
        return int(selftest() > 0)
    shown = [rule for rule in RULES if options.list or rule.name == options.explain]
    for rule in shown:
        print(f"{rule.name}: {rule.why} {rule.before!r} -> {rule.after!r} ({', '.join(rule.kinds)})")
    if shown:
        return 0
    rules = [rule for rule in RULES if not options.rule or rule.name in options.rule]
    findings = check(options.root, rules, options.changed)
    if options.json:
        print(json.dumps(counts(findings, rules)))
        return int(bool(findings))
    limit = options.max or (24 if options.changed else len(findings))
    for finding in spread(findings, limit):
        print(finding)
    if limit < len(findings):
        print(f"{len(findings) - limit} more; print all with --max {len(findings)}; see --explain RULE")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
