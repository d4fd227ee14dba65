"""`torchrun --nnodes 1:4`: nodes are lost and join at random; the run goes on with as many as there are, exactly.

With NESTREC_ELASTIC_RESULTS naming a file, what was found is kept there.
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

MOST_NODES = 4
SAVED_STEPS = 4


class Nodes:
    """Launchers that each stand for a machine with one rank. Their meeting place is a process of its own, as etcd or a
    head node would be: here, the test."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._command = command
        self._folder = folder
        self._count = 0
        self.running: list[subprocess.Popen[bytes]] = []

    def join(self) -> None:
        conf = "is_host=0,last_call_timeout=1,join_timeout=120,keep_alive_interval=1,keep_alive_max_attempt=10"
        launcher = [sys.executable, "-m", "torch.distributed.run", f"--nnodes=1:{MOST_NODES}", "--nproc-per-node=1"]
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
        """A machine is gone with all that ran on it."""
        node = self.running.pop(number)
        if node.poll() is not None:
            return
        family = [node.pid, *(child.pid for child in psutil.Process(node.pid).children(recursive=True))]
        for process in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        node.wait()

    def stop(self) -> None:
        """All are told to save and end."""
        for node in self.running:
            node.terminate()
        for node in self.running:
            node.wait(timeout=60)

    def close(self) -> None:
        while self.running:
            self.lose(0)

    def said(self) -> str:
        return "\n".join(
            f"{path.name}:\n{path.read_text(errors='replace')[-1500:]}" for path in self._folder.glob("node-*")
        )


def records_of(run: Path) -> list[dict[str, Any]]:
    """Whole lines of the run's metrics, which may be written to just now."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def losses_of(run: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in records_of(run) if record["kind"] == "step"}


def reached_of(run: Path) -> int:
    """The last step that is over, as the run itself keeps it for the start that follows a crash; 0: not known now."""
    content = (run / "progress").read_bytes()
    return int(struct.unpack_from("<q", content)[0]) if len(content) >= 8 else 0


def resumed_on(run: Path) -> list[int]:
    """Ranks of each start that went on from a checkpoint."""
    return [r["ranks"] for r in records_of(run) if str(r.get("text", "")).startswith("resumed from")]


def disturbed(command: list[str], run: Path, folder: Path, *, changes: int, seed: int, limit_s: float) -> list[str]:
    """Lose and add nodes at random, each time when the last change has been made up for, and stop; what was done."""
    draw = random.Random(seed)
    done = list[str]()
    mark = 0
    lost_steps = None
    nodes = Nodes(command, folder)
    deadline_s = time.monotonic() + limit_s
    try:
        for _ in range(2):
            nodes.join()
        while True:
            assert time.monotonic() < deadline_s, f"hangs after {done}\n{nodes.said()}"
            assert all(node.poll() is None for node in nodes.running), f"ended by itself after {done}\n{nodes.said()}"
            newest = max(committed_steps(run / "checkpoints"), default=0)
            is_settled = (resumed_on(run) or [2])[-1] == len(nodes.running)
            if is_settled and newest >= mark + SAVED_STEPS:
                if len(done) == changes:
                    break
                if lost_steps is None:
                    is_loss = len(nodes.running) == MOST_NODES or (len(nodes.running) > 1 and draw.random() < 0.5)
                    lost_steps = draw.randrange(1, SAVED_STEPS) if is_loss else 0
                if reached_of(run) >= newest + lost_steps:
                    if lost_steps:
                        nodes.lose(draw.randrange(len(nodes.running)))
                    else:
                        nodes.join()
                    done.append(f"{'loss' if lost_steps else 'join'} at step {newest}, then {len(nodes.running)} nodes")
                    print(f"{time.strftime('%X')} {done[-1]}", flush=True)
                    mark = newest
                    lost_steps = None
            time.sleep(0.05)
        nodes.stop()
    finally:
        nodes.close()
    return done


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_random_losses_and_joins_end_as_an_undisturbed_run(tmp_path: Path) -> None:
    """Twenty of them, unless NESTREC_ELASTIC_CHANGES says otherwise."""
    changes = int(os.environ.get("NESTREC_ELASTIC_CHANGES", "20"))
    make_datasets(tmp_path)
    more: dict[str, object] = {"training.epochs": 10**6, "training.checkpoint_every_steps": SAVED_STEPS}
    more |= {"training.evaluate_every_epochs": 0, "batch.batch_samples": 16, "pipeline.schedule": "nested"}
    whole = tmp_path / "whole"
    run = tmp_path / "run"
    start_s = time.monotonic()
    done = disturbed(command_of("hstu", tmp_path, run, more), run, tmp_path, changes=changes, seed=3, limit_s=2000)
    took_s = time.monotonic() - start_s
    assert len(done) == changes
    last = max(committed_steps(run / "checkpoints"))
    command = command_of("hstu", tmp_path, whole, {**more, "training.max_steps": last})
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    expected, found = losses_of(whole), losses_of(run)
    assert found.keys() == expected.keys()
    pairs = [(found[step], expected[step]) for step in sorted(expected)]
    difference = max(abs(a - b) / abs(b) for a, b in pairs)
    lost = [(r["lost_steps"], r["lost_s"]) for r in records_of(run) if "lost_steps" in r]
    print(f"{last} steps, {len(resumed_on(run))} starts on {resumed_on(run)} ranks, lost {lost}")
    print(f"last losses {pairs[-1]}, largest difference {difference:.1e}")
    if name := os.environ.get("NESTREC_ELASTIC_RESULTS"):
        row: dict[str, Any] = {"changes": len(done), "losses": sum(each.startswith("loss") for each in done)}
        row |= {"joins": row["changes"] - row["losses"], "steps": last, "starts": len(resumed_on(run))}
        row |= {"ranks_of_starts": resumed_on(run), "lost_steps": [steps for steps, _ in lost]}
        row |= {"lost_s": [round(seconds, 2) for _, seconds in lost], "largest_difference": float(f"{difference:.1e}")}
        row |= {"seconds": round(took_s), "last_losses": pairs[-1]}
        again = "NESTREC_ELASTIC_RESULTS=FILE pytest -m slow tests/faults/test_elastic.py"
        write_frame(Path(name), bench="elastic", command=again, rows=[row])
    assert difference < 1e-3
    assert len(set(resumed_on(run))) > 1, "on different numbers of ranks"
    assert lost, "the report says what was lost"
    assert all(seconds is not None for _, seconds in lost)
