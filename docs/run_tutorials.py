"""Executes the notebooks of docs/tutorials and stores their outputs in them: `make tutorials`.

    python docs/run_tutorials.py movielens kuairand --data ~/datasets

A notebook runs in an empty temporary folder. Its commands (`%%bash` cells) find `nestrec` in the environment of this
script. Notebooks do not download anything: they read the unpacked downloads, such as `ml-100k/u.data`, from the folder
in the environment variable NESTREC_TUTORIAL_DATA. Progress lines, durations, absolute paths and escape sequences are
removed from the stored outputs.
"""

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

TUTORIALS = Path(__file__).resolve().parent / "tutorials"
CELL_TIMEOUT_S = 3600

ESCAPE_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
PROGRESS_LINE = re.compile(r"^(epoch .* samples/s .*|[a-z-]+ \S+: (\w+: \d+%.*|done.*))\n?", re.MULTILINE)
DURATION = re.compile(r" in (\d+m )?\d+(\.\d+)? ?s(?=;|$| \()| \([\d.,]+k? per second\)", re.MULTILINE)


def execute(notebook: NotebookNode, folder: Path, env: Mapping[str, str] | None = None) -> NotebookNode:
    """Execute all cells of a notebook and return it with the new outputs.

    Args:
        notebook: Notebook to execute; it is changed.
        folder: Working folder of the notebook.
        env: Environment variables for the notebook, in addition to those of this process.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell raised an exception, or a command failed.
    """
    commands = str(Path(sys.executable).parent)
    variables = {
        **os.environ,
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        **(env or {}),
        "PATH": os.pathsep.join([commands, os.environ.get("PATH", "")]),
    }
    client = NotebookClient(
        notebook, timeout=CELL_TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env=variables)
    return notebook


def clean(notebook: NotebookNode, folders: Mapping[str, str]) -> None:
    """Remove from a notebook everything that differs between machines and executions.

    Args:
        notebook: Executed notebook; it is changed.
        folders: Maps absolute paths that outputs may contain to their replacements.
    """
    notebook.metadata = NotebookNode(
        kernelspec={"display_name": "Python 3", "language": "python", "name": "python3"},
        language_info={"name": "python"},
    )
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        cell.metadata = NotebookNode({key: value for key, value in cell.metadata.items() if key == "tags"})
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = _clean_outputs(cell.outputs, folders)


def _clean_outputs(outputs: list[NotebookNode], folders: Mapping[str, str]) -> list[NotebookNode]:
    """Return the outputs with clean texts. The texts of all streams become a single one, in order."""
    streams = [output for output in outputs if output.output_type == "stream"]
    text = clean_text("".join(stream.text for stream in streams), folders)
    cleaned = [nbformat.v4.new_output("stream", name="stdout", text=text)] if text.strip() else []
    for output in outputs:
        if output.output_type == "stream":
            continue
        if "execution_count" in output:
            output.execution_count = None
        if "text/plain" in output.get("data", {}):
            output.data["text/plain"] = clean_text(output.data["text/plain"], folders)
        output.metadata = NotebookNode()
        cleaned.append(output)
    return cleaned


def clean_text(text: str, folders: Mapping[str, str]) -> str:
    """Return a text output without escape sequences, progress lines, durations and absolute paths."""
    text = ESCAPE_SEQUENCE.sub("", text)
    # A terminal overwrites a line after a carriage return.
    text = "\n".join(line.rstrip("\r").rsplit("\r", 1)[-1].rstrip() for line in text.split("\n"))
    text = PROGRESS_LINE.sub("", text)
    text = DURATION.sub("", text)
    for path, name in sorted(folders.items(), key=lambda item: -len(item[0])):
        text = text.replace(path, name)
    return text


def run(path: Path, data: Path) -> None:
    """Execute a notebook in a temporary folder, and write it with its outputs.

    Args:
        path: Notebook to execute and to rewrite.
        data: Folder with the unpacked datasets.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        execute(notebook, Path(folder), {"NESTREC_TUTORIAL_DATA": str(data)})
        working = str(Path(folder).resolve())
        clean(notebook, {f"{working}/": "", working: ".", f"{data}/": "", str(data): ".", str(Path.home()): "~"})
    nbformat.validate(notebook)
    nbformat.write(notebook, path)


def main() -> None:
    names = sorted(path.stem for path in TUTORIALS.glob("*.ipynb"))
    parser = argparse.ArgumentParser(description="Execute tutorial notebooks and store their outputs.")
    parser.add_argument("names", nargs="*", choices=[*names, []], help="notebooks, by default all: " + ", ".join(names))
    parser.add_argument("--data", default=os.environ.get("NESTREC_TUTORIAL_DATA", "."), help="folder with the datasets")
    args = parser.parse_args()
    for name in args.names or names:
        print(f"execute {name}", flush=True)
        run(TUTORIALS / f"{name}.ipynb", Path(args.data).resolve())


if __name__ == "__main__":
    main()
