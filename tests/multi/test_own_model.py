"""Models of users' own on several ranks."""

import contextlib
import io
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import nestrec
from nestrec.distributed import Topology

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_model.py"


SAID = re.compile(r"loss ([\d.]+) -> ([\d.]+); tables and weights equal to the bit: (\w{16})")


def _run_example(topology: Topology) -> str:
    """What it says on a rank whose process group is there already."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", str(topology.world))
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return said.getvalue()


def check_lines(said: str) -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 60
    lines = SAID.findall(said)
    assert len(lines) == 2, "of each rank; their lines may run into each other"
    assert lines[0] == lines[1], "the ranks agree"
    assert float(lines[0][1]) < 0.9 * float(lines[0][0])


def test_the_example_trains_on_two_ranks_and_nested_equals_serial(pools):
    check_lines("\n".join(pools[2].run(_run_example)))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_example_runs_under_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(EXAMPLE)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    check_lines(ended.stdout)


class Sum(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(2))

    def forward(self, vectors, batch):
        return (vectors["t"] * self.scale).sum(), len(vectors["t"])


def _train(topology, counts) -> str:
    table = nestrec.Table("t", rows=9, dim=2)
    model = Sum()
    torch.nn.init.constant_(model.scale, 1.0 + topology.rank)  # all take that of the first rank
    pipeline = nestrec.TrainingPipeline(model, [table], schedule="nested", topology=topology, micro_batches=2)
    try:
        for _ in pipeline.run({"t": np.arange(count) + step} for step, count in enumerate(counts[topology.rank])):
            pass
        return pipeline.digest()
    finally:
        pipeline.close()


def test_ranks_may_hold_unequal_samples_and_begin_with_the_weights_of_the_first(pools):
    digests = pools[2].run(_train, [[3, 0, 2], [1, 4, 0]])
    assert digests[0] == digests[1]


def test_a_rank_with_fewer_batches_is_named_on_every_rank(pools):
    failures = pools[2].outcomes(_train, [[3, 2, 1], [3, 2]])
    assert ["rank = 1: has fewer batches" in failure.text for failure in failures] == [True, True]
