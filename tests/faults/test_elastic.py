"""Elastic training with `torchrun --nnodes 1:4`: nodes fail and join at random, and the run continues with the others.

The results are written to the file named by NESTREC_ELASTIC_RESULTS, if it is set.
"""

import contextlib
import json
import os
import random
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore

from nestrec.checkpoint.checkpoint_manifest import committed_steps
from nestrec.report.result_file import write_frame
from support.tiny_runs import command_of, make_datasets

MAX_NODES = 4
CHECKPOINT_EVERY_STEPS = 4


class Nodes:
    """Launchers that each represent a machine with one rank; this process hosts their rendezvous store."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._command = command
        self._folder = folder
        self._count = 0
        self.running: list[subprocess.Popen[bytes]] = []

    def join(self) -> None:
        conf = "is_host=0,last_call_timeout=1,join_timeout=120,keep_alive_interval=1,keep_alive_max_attempt=10"
        launcher = [sys.executable, "-m", "torch.distributed.run", f"--nnodes=1:{MAX_NODES}", "--nproc-per-node=1"]
        launcher += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self._store.port}", "--rdzv-id=elastic"]
        launcher += [f"--rdzv-conf={conf}", "--max-restarts=1000", "--monitor-interval=0.2", *self._command[1:]]
        self._count += 1
        output = (self._folder / f"node-{self._count}.txt").open("wb")
        with output:
            self.running.append(
                subprocess.Popen(
                    launcher,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
                    start_new_session=True,
                )
            )

    def lose(self, number: int) -> None:
        """Kill all processes of a machine."""
        node = self.running.pop(number)
        if node.poll() is not None:
            return
        processes = [node.pid, *(child.pid for child in psutil.Process(node.pid).children(recursive=True))]
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        node.wait()

    def stop(self) -> None:
        """Send SIGTERM to all machines, so that the run saves and stops, and wait for them."""
        for node in self.running:
            node.terminate()
        for node in self.running:
            node.wait(timeout=60)

    def close(self) -> None:
        while self.running:
            self.lose(0)

    def output(self) -> str:
        return "\n".join(
            f"{path.name}:\n{path.read_text(errors='replace')[-1500:]}" for path in self._folder.glob("node-*")
        )


def records_of(run: Path) -> list[dict[str, Any]]:
    """Return the complete lines of the run's metrics; the run may be writing the last line."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def losses_of(run: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in records_of(run) if record["kind"] == "step"}


def progress_of(run: Path) -> int:
    """Return the last completed step of the run's progress file, or 0 if the file is not complete."""
    content = (run / "progress").read_bytes()
    return int(struct.unpack_from("<q", content)[0]) if len(content) >= 8 else 0


def num_ranks_of_resumes(run: Path) -> list[int]:
    """Return the number of ranks of each start that resumed from a checkpoint."""
    return [r["ranks"] for r in records_of(run) if str(r.get("text", "")).startswith("resumed from")]


def change_nodes(command: list[str], run: Path, folder: Path, *, changes: int, seed: int, limit_s: float) -> list[str]:
    """Run a command on nodes that are killed and added at random, and stop it after all changes.

    Before each change, the run must have resumed on the current nodes and saved a checkpoint.

    Args:
        command: The training command.
        run: Run folder.
        folder: Folder for the output of the nodes.
        changes: Number of changes.
        seed: Seed of the changes.
        limit_s: Time limit.

    Returns:
        Descriptions of the changes.
    """
    draw = random.Random(seed)
    done = list[str]()
    last_change_step = 0
    lost_steps = None
    nodes = Nodes(command, folder)
    deadline_s = time.monotonic() + limit_s
    try:
        for _ in range(2):
            nodes.join()
        while True:
            assert time.monotonic() < deadline_s, f"hangs after {done}\n{nodes.output()}"
            is_running = all(node.poll() is None for node in nodes.running)
            assert is_running, f"a node exited without a kill after {done}\n{nodes.output()}"
            newest = max(committed_steps(run / "checkpoints"), default=0)
            has_resumed = (num_ranks_of_resumes(run) or [2])[-1] == len(nodes.running)
            if has_resumed and newest >= last_change_step + CHECKPOINT_EVERY_STEPS:
                if len(done) == changes:
                    break
                if lost_steps is None:
                    is_loss = len(nodes.running) == MAX_NODES or (len(nodes.running) > 1 and draw.random() < 0.5)
                    lost_steps = draw.randrange(1, CHECKPOINT_EVERY_STEPS) if is_loss else 0
                if progress_of(run) >= newest + lost_steps:
                    if lost_steps:
                        nodes.lose(draw.randrange(len(nodes.running)))
                    else:
                        nodes.join()
                    done.append(f"{'loss' if lost_steps else 'join'} at step {newest}, then {len(nodes.running)} nodes")
                    print(f"{time.strftime('%X')} {done[-1]}", flush=True)
                    last_change_step = newest
                    lost_steps = None
            time.sleep(0.05)
        nodes.stop()
    finally:
        nodes.close()
    return done


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_elastic_training_with_random_node_changes(tmp_path: Path) -> None:
    """The number of changes is 20, or NESTREC_ELASTIC_CHANGES if it is set."""
    changes = int(os.environ.get("NESTREC_ELASTIC_CHANGES", "20"))
    make_datasets(tmp_path)
    more: dict[str, object] = {"training.epochs": 10**6, "training.checkpoint_every_steps": CHECKPOINT_EVERY_STEPS}
    more |= {"training.eval_every_epochs": 0, "batch.batch_size": 16, "pipeline.schedule": "nested"}
    uninterrupted = tmp_path / "uninterrupted"
    run = tmp_path / "run"
    start_s = time.monotonic()
    done = change_nodes(command_of("hstu", tmp_path, run, more), run, tmp_path, changes=changes, seed=3, limit_s=2000)
    took_s = time.monotonic() - start_s
    assert len(done) == changes
    last = max(committed_steps(run / "checkpoints"))
    command = command_of("hstu", tmp_path, uninterrupted, {**more, "training.max_steps": last})
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    expected = losses_of(uninterrupted)
    losses = losses_of(run)
    assert losses.keys() == expected.keys()
    pairs = [(losses[step], expected[step]) for step in sorted(expected)]
    difference = max(abs(a - b) / abs(b) for a, b in pairs)
    lost = [(r["lost_steps"], r["lost_s"]) for r in records_of(run) if "lost_steps" in r]
    ranks = num_ranks_of_resumes(run)
    print(f"{last} steps, {len(ranks)} starts on {ranks} ranks, lost {lost}")
    print(f"last losses {pairs[-1]}, largest difference {difference:.1e}")
    if name := os.environ.get("NESTREC_ELASTIC_RESULTS"):
        row: dict[str, Any] = {"changes": len(done), "losses": sum(each.startswith("loss") for each in done)}
        row |= {"joins": row["changes"] - row["losses"], "steps": last, "starts": len(ranks)}
        row |= {"ranks_of_starts": ranks, "lost_steps": [steps for steps, _ in lost]}
        row |= {"lost_s": [round(seconds, 2) for _, seconds in lost], "largest_difference": float(f"{difference:.1e}")}
        row |= {"seconds": round(took_s), "last_losses": pairs[-1]}
        command_line = "NESTREC_ELASTIC_RESULTS=FILE pytest -m slow tests/faults/test_elastic.py"
        write_frame(Path(name), bench="elastic", command=command_line, rows=[row])
    assert difference < 1e-3
    assert len(set(ranks)) > 1, "the run resumed on different numbers of ranks"
    assert lost, "the metrics contain the lost steps"
    assert all(seconds is not None for _, seconds in lost)
