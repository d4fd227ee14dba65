"""Load stored artifacts with the code of this tree, and describe what was loaded as plain values.

`write_artifacts.py` stores these values next to the artifacts as expected.json, and test_old_formats.py compares them
with what later code loads. Every observer runs in a folder into which all archives were unpacked.
"""

import contextlib
import hashlib
import itertools
import json
import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import nn

import nestrec
from nestrec.checkpoint import CheckpointManager
from nestrec.data import Dataset

ARTIFACTS = Path(__file__).parent / "artifacts"
EXPECTED_FILE = "expected.json"
MORE_STEPS = 2
"""Steps for which a run is continued."""
TIMES_MS = [1_640_000_000_000 + 3_600_000 * hour for hour in range(4)]
HISTORY = {"items": ["i3", "i5", "i1", "i8"], "times_ms": TIMES_MS, "now_ms": TIMES_MS[-1] + 1000}
RICH_HISTORY = {
    **HISTORY,
    "actions": [["click"], [], ["click", "like"], ["like"]],
    "features": {"device": ["web", "app", "tv", "web"], "price": [1.5, 20.0, 7.25, 49.9]},
    "user_features": {"country": "at"},
}
CANDIDATES = ["i2", "i9", "i0"]
HISTORY_USER = "u1"
HISTORY_PARTS: list[dict[str, Any]] = [
    {"items": ["12", "7"], "times_ms": [1000, 2000], "actions": [["click"], []], "features": {"price": [1.5, None]}},
    {"items": ["i3", "i3"], "times_ms": [1500, 3000], "actions": None, "features": {"device": ["web", "web"]}},
    {"items": [5, -(2**40)], "times_ms": [4000, 5000], "actions": [["like"], ["like"]], "features": {}},
]
"""Parts of a packed history that use every form of a column."""


def unpack(artifacts: Path, folder: Path) -> None:
    for file in sorted(artifacts.glob("*.tar.xz")):
        with tarfile.open(file) as tar:
            tar.extractall(folder, filter="data")


def observe_dataset() -> dict[str, Any]:
    """Opens the newest and the first generation, then appends a third one."""
    newest = {name: _described(Dataset.open(f"data/{name}")) for name in ("sequences", "rows")}
    first = _described(Dataset.open("data/sequences", generation=0))
    card = nestrec.append("logs/last.csv", "data/sequences")
    counts = {"users": card.counts.users, "items": card.counts.items, "events": card.counts.events}
    return {**newest, "first generation": first, "appended": {**counts, "generation": card.generation}}


def _described(dataset: Dataset) -> dict[str, Any]:
    card = dataset.card
    all_rows = np.arange(dataset.num_samples)
    rows = dataset.rows(all_rows)
    lists = {name: digest(values, offsets) for name, (values, offsets) in rows.lists.items()}
    scalars = {name: digest(values) for name, values in rows.scalars.items()}
    columns = [feature.column for feature in card.features]
    vocabularies = {name: dataset.vocabulary(name).to_pydict() for name in columns if dataset.has_vocabulary(name)}
    sequences = card.kind == "sequences"
    return {
        "counts": [card.counts.users, card.counts.items, card.counts.events],
        "generations": [[state.number, state.events, state.users, state.items] for state in card.generations],
        "files": card.digest_of_files,
        "actions": dict(card.action_bits),
        "features": columns,
        "columns": {**scalars, **lists},
        "vocabularies": text_digest(vocabularies),
        "users": text_digest(dataset.user_keys(all_rows)) if sequences else "",
        "items": text_digest(dataset.items().to_pydict()) if sequences else "",
        "titles": text_digest(list(dataset.item_texts())) if sequences else "",
    }


def observe_run(task: str) -> dict[str, Any]:
    """Reads the checkpoints and scores of a run, then continues its training."""
    run = f"runs/{task}"
    observed: dict[str, Any] = {
        "checkpoints": _checkpoints(Path(run) / "checkpoints"),
        "best": _checkpoints(Path(run) / "best"),
        "metrics": {
            "best": _metrics(nestrec.evaluate(run, "valid")),
            "last": _metrics(nestrec.evaluate(run, "valid", best=False)),
        },
    }
    observed["scores"] = {"best": _scores(run), "last": _scores(run, best=False)}
    return {**observed, "continued": continued(run)}


def _metrics(evaluation: nestrec.Evaluation) -> dict[str, float]:
    return {name: round(metric.mean, 6) for name, metric in evaluation.metrics["model"].items()}


def continued(run: str) -> dict[str, Any]:
    """Trains some more steps; returns their losses and the norm of every weight, table and optimizer state."""
    config, lines = Path(run) / "config.json", Path(run) / "metrics.jsonl"
    num_lines = len(lines.read_text().splitlines())
    steps = json.loads(config.read_text())["training"]["max_steps"] + MORE_STEPS
    trained = nestrec.train(config, {"training.max_steps": steps}, output=run)
    records = [json.loads(line) for line in lines.read_text().splitlines()[num_lines:]]
    losses = {str(line["step"]): line["loss"] for line in records if line["kind"] == "step"}
    restored = CheckpointManager(Path(run) / "checkpoints").restore(steps)
    norms = {name: norm(tensor) for name, tensor in restored.tensors.items()}
    for table in restored.tables:
        norms |= {f"{table} {name}": norm(column) for name, column in _columns(restored, table).items()}
    consumed = restored.state["train"]["consumed"]
    return {"best step": trained.steps, "consumed": consumed, "losses": losses, "norms": norms}


def observe_mirror() -> dict[str, Any]:
    """Continues a run whose own folder has lost its checkpoints from training.checkpoint_mirror."""
    for folder in ("checkpoints", "best"):
        shutil.rmtree(f"runs/retrieval/{folder}")
    copies = {folder: _checkpoints(Path("mirror", folder)) for folder in ("checkpoints", "best")}
    return {**copies, "continued": continued("runs/retrieval")}


def observe_followed() -> dict[str, Any]:
    """Continues a run that follows a stream, from the position at which it stopped."""
    run = "runs/followed"
    checkpoints = _checkpoints(Path(run) / "checkpoints")
    before = {"checkpoints": checkpoints, "scores": _scores(run), "published": _scores("published_stream")}
    items = len(nestrec.load("published_stream").item_ids)
    shutil.copy("logs/last.csv", "logs/stream/2.csv")
    steps = follow(run, on_source_change="moved")
    added = [kind for _, *kind in _versions("published_stream")]
    counts = _described(Dataset.open("data/stream"))["counts"]
    after = {"steps": steps, "versions": added, "data": counts, "published": _scores("published_stream")}
    return {**before, "items": items, "continued": after}


def follow(run: str, **overrides: Any) -> int:
    """Trains on the new files in the folder of events; returns the number of steps that the run has made."""
    options = {
        "window.events": 20,
        "stop_after_idle_s": 0.01,
        "poll_interval_s": 0.01,
        "log.max_future_s": None,
        **overrides,
    }
    return nestrec.follow("logs/stream", run, options).steps


def _checkpoints(folder: Path) -> dict[str, Any]:
    checkpoints = CheckpointManager(folder)
    return {str(step): _checkpoint(checkpoints.restore(step)) for step in checkpoints.steps()}


def _checkpoint(restored: Any) -> dict[str, str]:
    """Returns digests of the weights, of their optimizer state, and of each table with its optimizer state."""
    digests: dict[str, str] = {}
    for group, names in itertools.groupby(sorted(restored.tensors), lambda name: name.partition("/")[0]):
        digests[group] = digest(*(restored.tensors[name] for name in names))
    for table in restored.tables:
        digests[f"table {table}"] = digest(*_columns(restored, table).values())
    return {**digests, "consumed": restored.state["train"]["consumed"]}


def _columns(restored: Any, table: str) -> dict[str, torch.Tensor]:
    """Returns the keys, weights and optimizer state of a table, in order of the keys."""
    chunks = list(restored.rows(table))
    if not chunks:
        return {}
    columns = {name: torch.cat([chunk[name] for chunk in chunks]) for name in sorted(chunks[0])}
    order = columns["keys"].argsort()
    return {name: column[order] for name, column in columns.items()}


def observe_servable(name: str) -> dict[str, Any]:
    folder = f"models/{name}"
    model = nestrec.load(folder)
    observed: dict[str, Any] = {"version": model.servable.version, "outputs": list(model.outputs)}
    if name == "ctr":
        return {**observed, "scores": _scores(folder)}
    vectors = model.item_vectors()
    return {**observed, "items": text_digest(model.item_ids), "vectors": digest(vectors), "scores": _scores(folder)}


def observe_service() -> dict[str, Any]:
    """Starts a server, which compares its scores with those that each exported folder records."""
    from nestrec.serving.service.inference_service import Service, ServiceConfig

    models_of_role: dict[str, str] = {}
    for models in (["models/retrieval", "models/ranking"], ["published"], ["models/ctr"]):
        with contextlib.closing(Service.load(models, ServiceConfig())) as service:
            models_of_role |= {service.sources[role]: role for role in service.sources}
    return models_of_role


def _scores(source: str, *, best: bool = True) -> dict[str, Any]:
    """Returns the answers of a model to fixed requests."""
    model = nestrec.load(source, best=best)
    if model.servable.spec.task.kind == "rows":
        names = [column.name.removeprefix("event_") for column in model.servable.spec.columns]
        context = {name: 7 if name.startswith("I") else "00000003" for name in names}
        ranked = model.rank([], ["a"], context=context)
        return {"rank": [list(ranked.items), _plain(ranked.scores)]}
    if model.servable.index is None:
        ranked = model.rank(RICH_HISTORY, CANDIDATES, context={"device": "app", "price": 12.5})
        return {"rank": [list(ranked.items), _plain(ranked.scores)]}
    recommended = model.recommend(HISTORY, k=5)
    ranked = model.rank(HISTORY, CANDIDATES)
    return {
        "recommend": [list(recommended.items), _plain(recommended.scores)],
        "rank": [list(ranked.items), _plain(ranked.scores)],
    }


def _plain(scores: Mapping[str, Any]) -> dict[str, list[float]]:
    return {name: [round(float(score), 6) for score in values] for name, values in scores.items()}


def observe_published() -> dict[str, Any]:
    """Loads every version at the address, and the newest one after the continued run has published more of them."""
    before = _versions("published")
    scores = {version: _scores(f"published@{version}") for version, _, _ in before}
    newest = _scores("published")
    continued("runs/retrieval")
    after = {"versions": [kind for _, *kind in _versions("published")], "newest": _scores("published")}
    return {"versions": before, "scores": scores, "newest": newest, "continued": after}


def _versions(address: str) -> list[list[Any]]:
    """Returns the name and step of each version and whether it is stored as a delta alone, the newest first."""
    from nestrec.artifacts.storage import storage_of
    from nestrec.serving.versions.version_store import VersionStore

    versions = VersionStore(storage_of(address))
    listed: list[list[Any]] = []
    for folder, version in versions.published():
        manifest = versions.read_description(folder, version)
        assert manifest is not None
        kinds = {file.name.partition(".")[0] for file in Path(address, "versions", folder).iterdir()}
        listed.append([version, manifest.step, "full" not in kinds])
    return listed


def observe_own_model() -> dict[str, Any]:
    pipeline = own_pipeline()
    state = nestrec.PipelineCheckpoints(pipeline, "own_model").restore()
    restored = pipeline.digest()
    losses = train_own(pipeline, 2)
    pipeline.close()
    return {"state": state, "digest": restored, "continued": losses}


def own_pipeline() -> Any:
    """Builds a training pipeline around a module, as users of nestrec.TrainingPipeline do."""
    torch.manual_seed(1)
    model = OwnModel()
    tables = [
        nestrec.Table("item", rows=9, dim=4, optimizer="adam", dtype="bfloat16"),
        nestrec.Table("user", rows=None, dim=2),
    ]
    adam = torch.optim.Adam(model.parameters(), lr=0.02, betas=(0.8, 0.9))
    return nestrec.TrainingPipeline(model, tables, dense_optimizer=adam, schedule="serial", micro_batches=2)


class OwnModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 1)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, vectors: Mapping[str, torch.Tensor], batch: Any) -> tuple[torch.Tensor, int]:
        score = self.mix(self.norm(vectors["item"])) * vectors["user"].sum(1, keepdim=True)
        return nn.functional.softplus(score).sum(), len(score)


def train_own(pipeline: Any, num_steps: int) -> list[float]:
    """Trains the next steps; returns their losses."""

    def batches() -> Iterator[dict[str, Any]]:
        for step in itertools.count(pipeline.number):
            draw = np.random.default_rng(step)
            yield {"item": draw.integers(0, 9, 6), "user": draw.integers(0, 9, 6) * 10**12}

    return [float(loss) for loss in pipeline.run(itertools.islice(batches(), num_steps))]


def packed_history(user: str, parts: Sequence[Mapping[str, Any]]) -> bytes:
    from nestrec.serving.history_store.history_codec import encode_events

    return b"".join(encode_events(user, part) for part in parts)


def observe_history() -> dict[str, Any]:
    """Reads the events of a user from the bytes of a history store."""
    from nestrec.serving.history_store.history_codec import decode_parts, merge_parts

    parts = decode_parts(HISTORY_USER, Path("history.bin").read_bytes())
    return {"parts": [dict(part) for part in parts], "merged": dict(merge_parts(parts, 6))}


def observe_result() -> dict[str, Any]:
    from nestrec.report.result_file import join_frames, load_frame

    frame = load_frame(Path("result.json"))
    joined = join_frames([frame, frame], bench="joined", command="")
    return {"bench": frame["bench"], "first row": frame["rows"][0], "joined rows": len(joined["rows"])}


def observe_report() -> dict[str, Any]:
    """Writes the page of a run, and looks for the content of its records in it."""
    from nestrec.report import write_report

    page = write_report(Path("runs/retrieval"), {}).read_text()
    test = json.loads(Path("runs/retrieval/eval/test.json").read_text())["metrics"]["model"]["ndcg@10"][0]
    platform = json.loads(Path("runs/retrieval/versions.json").read_text())["platform"]
    return {"metric": f"{test:.4g}" in page, "platform": platform in page, "stages": "dense.update" in page}


def observe_job() -> dict[str, Any]:
    """Continues a killed batch inference job; the finished part, which is marked here, is not computed again."""
    part = Path("jobs/killed.parquet.parts/part-000000.parquet")
    table = pq.read_table(part)
    marked = ["not computed again", *table["user"].to_pylist()[1:]]
    pq.write_table(table.set_column(0, "user", [marked]), part)
    from nestrec.inference.batch_inference import BatchJobConfig

    batch = nestrec.load("models/retrieval").batch(BatchJobConfig(k=5, part_users=10))
    count = batch.recommend("all", "jobs/killed.parquet", data="data/sequences")
    output = pq.read_table("jobs/killed.parquet")
    complete = pq.read_table("jobs/whole.parquet")
    return {
        "users": count,
        "first": output["user"].to_pylist()[:2],
        "rest": output["user"].to_pylist()[1:] == complete["user"].to_pylist()[1:],
        "items": text_digest(output["items"].to_pylist()),
        "same items": output["items"].to_pylist() == complete["items"].to_pylist(),
    }


def observe_config() -> dict[str, Any]:
    """Returns the options of each stored configuration whose value this tree reads differently."""
    from nestrec.base.config import to_plain
    from nestrec.base.config_values import from_plain, rename_former_fields

    changed = {}
    for file in sorted(Path("configs").glob("*.json")):
        written = json.loads(file.read_text())
        stored = rename_former_fields(nestrec.RunConfig, written)
        assert sum(1 for _ in _leaves(stored)) == sum(1 for _ in _leaves(written)), "no option is lost"
        read = dict(_leaves(to_plain(from_plain(nestrec.RunConfig, written))))
        changed[file.stem] = [name for name, value in _leaves(stored) if read.get(name, "missing") != value]
    return changed


def _leaves(plain: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(plain, dict):
        yield name, plain
        return
    for key, value in plain.items():
        yield from _leaves(value, f"{name}.{key}")


OBSERVERS: dict[str, Callable[[], dict[str, Any]]] = {
    "dataset": observe_dataset,
    "retrieval_run": lambda: observe_run("retrieval"),
    "ranking_run": lambda: observe_run("ranking"),
    "rows_run": lambda: observe_run("rows"),
    "mirror": observe_mirror,
    "followed_run": observe_followed,
    "retrieval_servable": lambda: observe_servable("retrieval"),
    "int8_servable": lambda: observe_servable("retrieval_int8"),
    "faiss_servable": lambda: observe_servable("retrieval_faiss"),
    "ranking_servable": lambda: observe_servable("ranking"),
    "ctr_servable": lambda: observe_servable("ctr"),
    "published": observe_published,
    "own_model": observe_own_model,
    "service": observe_service,
    "history": observe_history,
    "report": observe_report,
    "result": observe_result,
    "job": observe_job,
    "config": observe_config,
}
"""Kind of an artifact to the function that loads and describes it."""


def digest(*arrays: Any) -> str:
    """Returns a digest of the bytes of arrays or tensors."""
    hasher = hashlib.sha256()
    for array in arrays:
        tensor = torch.as_tensor(np.ascontiguousarray(array) if isinstance(array, np.ndarray) else array)
        hasher.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()[:16]


def text_digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def norm(tensor: torch.Tensor) -> float:
    return float(tensor.double().norm())
