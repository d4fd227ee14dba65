"""Prints modules, lines and median lines per folder of the package: `make count`."""

import statistics
import subprocess
from collections import defaultdict

ROOTS = ("nestrec/", "benchmarks/nestrec_bench/", "tests/support/")


def folder_of(path: str) -> str:
    """Return the folder to which a file is counted: the children of `nestrec`, and the other roots completely."""
    if not path.startswith("nestrec/"):
        return next(root for root in ROOTS if path.startswith(root)).rstrip("/")
    parts = path.split("/")
    return "/".join(parts[:2]).removesuffix(".py") if len(parts) > 2 or not parts[1].startswith("__") else "nestrec"


def main() -> None:
    listed = subprocess.run(["git", "ls-files", "*.py"], capture_output=True, text=True, check=True).stdout.split()
    lines: dict[str, list[int]] = defaultdict(list)
    for path in filter(lambda path: path.startswith(ROOTS), listed):
        with open(path, encoding="utf-8") as file:
            lines[folder_of(path)].append(sum(1 for _ in file))
    print("| folder | modules | lines | median |\n| --- | ---: | ---: | ---: |")
    for folder, counts in sorted(lines.items()):
        print(f"| `{folder}` | {len(counts)} | {sum(counts):,} | {statistics.median(counts):.0f} |")
    package = [count for folder, counts in lines.items() if folder.startswith("nestrec") for count in counts]
    print(f"| **package** | {len(package)} | {sum(package):,} | {statistics.median(package):.0f} |")


if __name__ == "__main__":
    main()
