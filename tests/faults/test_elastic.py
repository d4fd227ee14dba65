"""`torchrun --nnodes 1:4`: nodes are lost and join at random; the run goes on with as many as there are, exactly."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from nestrec.base.exit_codes import INTERRUPTED
from nestrec.checkpoint.folders import committed_steps
from nestrec.testing.tiny_runs import command_of, make_datasets

MOST_NODES = 4
STEPS_A_CHANGE = 12


class Nodes:
    """Launchers that each stand for a machine with one rank. Their meeting place is a process of its own, as etcd or a
    head node would be: here, the test."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._command, self._folder, self._count = command, folder, 0
        self.running: list[subprocess.Popen[bytes]] = []
        self.codes: list[int] = []

    def join(self) -> None:
        conf = "is_host=0,last_call_timeout=1,join_timeout=120,keep_alive_interval=1,keep_alive_max_attempt=3"
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
        import psutil

        node = self.running.pop(number)
        family = [node.pid, *(child.pid for child in psutil.Process(node.pid).children(recursive=True))]
        for process in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        node.wait()

    def look(self) -> None:
        """Those that have ended by themselves are taken off the list."""
        for node in [node for node in self.running if node.poll() is not None]:
            self.running.remove(node)
            self.codes.append(node.returncode)

    def close(self) -> None:
        while self.running:
            self.lose(0)

    def said(self) -> str:
        return "\n".join(
            f"{path.name}:\n{path.read_text(errors='replace')[-1500:]}" for path in self._folder.glob("node-*")
        )


def losses_of(run: Path) -> dict[int, float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if record["kind"] == "step"}


def disturbed(command: list[str], run: Path, folder: Path, *, changes: int, seed: int, limit_s: float) -> list[str]:
    """Lose and add nodes at random, whenever a few more steps are saved, until the run is over; what was done."""
    draw, done = random.Random(seed), list[str]()
    nodes, deadline_s = Nodes(command, folder), time.monotonic() + limit_s
    try:
        for _ in range(2):
            nodes.join()
        while nodes.running:
            assert time.monotonic() < deadline_s, f"hangs after {done}\n{nodes.said()}"
            newest = max(committed_steps(run / "checkpoints"), default=0)
            if len(done) < changes and newest >= STEPS_A_CHANGE * (len(done) + 1):
                is_loss = len(nodes.running) == MOST_NODES or (len(nodes.running) > 1 and draw.random() < 0.5)
                if is_loss:
                    nodes.lose(draw.randrange(len(nodes.running)))
                else:
                    nodes.join()
                done.append(f"{'loss' if is_loss else 'join'} at {newest}: {len(nodes.running)} nodes")
                print(done[-1], flush=True)
            nodes.look()
            time.sleep(0.05)
    finally:
        nodes.close()
    assert all(code in (0, INTERRUPTED) for code in nodes.codes), nodes.said()
    return done


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("changes", [int(os.environ.get("NESTREC_ELASTIC_CHANGES", "20"))])
def test_20_random_losses_and_joins_end_as_an_undisturbed_run(tmp_path: Path, changes: int) -> None:
    make_datasets(tmp_path)
    steps = STEPS_A_CHANGE * (changes + 3)
    more = {"training.max_steps": steps, "training.epochs": 10_000, "training.checkpoint_every_steps": 4}
    more |= {"training.evaluate_every_epochs": 0, "batch.batch_samples": 16, "pipeline.schedule": "nested"}
    whole, run = tmp_path / "whole", tmp_path / "run"
    subprocess.run(command_of("hstu", tmp_path, whole, more), check=True, capture_output=True, timeout=300)
    done = disturbed(command_of("hstu", tmp_path, run, more), run, tmp_path, changes=changes, seed=3, limit_s=1400)
    assert len(done) == changes
    expected, found = losses_of(whole), losses_of(run)
    assert found.keys() == expected.keys()
    steps_seen = sorted(expected)
    torch.testing.assert_close(
        torch.tensor([found[s] for s in steps_seen]),
        torch.tensor([expected[s] for s in steps_seen]),
        rtol=1e-4,
        atol=1e-5,
    )
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    resumed = [event["ranks"] for event in events if str(event.get("text", "")).startswith("resumed from")]
    assert len(set(resumed)) > 1, "on different numbers of ranks"
    lost = [event["lost_steps"] for event in events if "lost_steps" in event]
    print(f"{len(resumed)} restarts on {resumed} ranks; steps lost: {lost}")
    assert lost, "the report says what was lost"
    assert max(lost) <= STEPS_A_CHANGE, "a loss costs what came since the last checkpoint"
