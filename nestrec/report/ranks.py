"""The ranks that a run's test left behind: where each user's target stood under each system."""

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestrec.base.errors import DamagedError, UserError
from nestrec.report.evaluations import mean_of_metric
from nestrec.report.run_folder import load_run

RANKS_FILE = Path("eval") / "test.npz"
_PREFIX = "rank/"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """Test ranks of one run, in order of users."""

    folder: Path
    """The run."""
    recipe: str
    """Name in its config."""
    dataset: str
    """Name on the dataset card."""
    model: str
    """Kind of the encoder."""
    device: str
    """What it was trained on."""
    seed: int
    """Of the run."""
    max_k: int
    """Ranks beyond it are recorded as 0."""
    users: NDArray[np.int64]
    """Sorted."""
    ranks: Mapping[str, NDArray[np.int64]]
    """Of each system and user: 1-based rank of the target, 0 beyond `max_k`."""
    item_events: NDArray[np.int64] | None
    """Training events of each target; none where the test is an older one."""
    validations: Mapping[int, float]
    """Epoch to the headline metric on the validation part; empty where the records are gone."""
    best_epoch: int | None
    """The epoch whose weights were tested."""

    @property
    def epochs(self) -> int | None:
        """Epochs after which the run was validated for the last time."""
        return max(self.validations, default=None)

    def of_rare(self, most_events: int) -> "Ranks":
        """Of the targets with so many training events at most."""
        if self.item_events is None:
            raise UserError("does not tell rare targets", field="run", value=str(self.folder), remedy="repeat its test")
        is_rare = self.item_events <= most_events
        kept = {system: rank[is_rare] for system, rank in self.ranks.items()}
        return replace(self, users=self.users[is_rare], ranks=kept, item_events=self.item_events[is_rare])


def load_ranks(run: Path) -> Ranks:
    """Read RUN/eval/test.npz and what the run was."""
    config, card, versions = (_load_json(run / name) for name in ("config.json", "card.json", "versions.json"))
    arrays = _load_arrays(run)
    order = np.argsort(arrays["users"], kind="stable")
    validations, best_epoch = _validations(run)
    try:
        return Ranks(
            folder=run,
            recipe=config["name"],
            dataset=card["name"],
            model=config["task"]["encoder"]["kind"],
            device=str(versions.get("device", "unknown")),
            seed=config["training"]["seed"],
            max_k=max(config["task"]["evaluation"]["ks"]),
            users=arrays["users"][order],
            ranks={name.removeprefix(_PREFIX): arrays[name][order] for name in arrays if name.startswith(_PREFIX)},
            item_events=arrays["item_events"][order] if "item_events" in arrays else None,
            validations=validations,
            best_epoch=best_epoch,
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        problem = f"is not a run of next-item retrieval: {error!r}"
        raise UserError(problem, field="run", value=str(run), remedy="name runs whose task is retrieval") from error


def has_ranks(run: Path) -> bool:
    """Whether the test of a run left ranks: that of next-item retrieval does."""
    path = run / RANKS_FILE
    if not path.is_file():
        return False
    with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
        return f"{_PREFIX}model" in file.files


def _load_arrays(run: Path) -> dict[str, NDArray[Any]]:
    path = run / RANKS_FILE
    if not path.is_file():
        raise UserError("has no test result", field="run", value=str(run), remedy=f"run `nestrec eval {run}` first")
    try:
        # Opened here: numpy leaves its own handle open when the archive is damaged.
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise _damaged(path, str(error)) from error
    if "users" not in arrays or f"{_PREFIX}model" not in arrays:
        raise _damaged(path, "holds no ranks of users")
    if any(array.shape != arrays["users"].shape for name, array in arrays.items() if name.startswith(_PREFIX)):
        raise _damaged(path, "does not hold one rank for each user")
    return arrays


def _validations(run: Path) -> tuple[dict[int, float], int | None]:
    """The headline metric by epoch, and the epoch at whose step the test was made."""
    records = [record for record in load_run(run).part("valid") if record.get("epoch") is not None]
    epoch_at = {record["step"]: record["epoch"] for record in records}
    result = run / RANKS_FILE.with_suffix(".json")
    tested_step = _load_json(result).get("step") if result.is_file() else None
    headlines = {r["epoch"]: mean_of_metric(r["metrics"], "model", r["headline"]) for r in records}
    return headlines, epoch_at.get(tested_step)


def _load_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"has no {path.name}", field="run", value=str(path.parent), remedy="name a run folder")
    try:
        value: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    return value


def _damaged(path: Path, problem: str) -> DamagedError:
    return DamagedError(problem, field="file", value=str(path), remedy="repeat the evaluation")
