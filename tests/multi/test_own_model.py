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
    assert ["rank=1: has fewer batches" in failure.text for failure in failures] == [True, True]


def _with_a_bad_batch(topology, bad) -> str:
    def batches():
        for step in range(6):
            if step == 4 and topology.rank == 1 and bad == "lost":
                raise OSError("disk gone")
            yield {"t": np.array([0.5])} if step == 4 and topology.rank == 1 else {"t": np.arange(3) + step}

    pipeline = nestrec.TrainingPipeline(
        Sum(), [nestrec.Table("t", rows=9, dim=2)], schedule="nested", topology=topology
    )
    try:
        list(pipeline.run(batches()))
    except (OSError, nestrec.UserError) as error:
        return str(error).split("\n")[0]
    finally:
        pipeline.close()
    return ""


def test_a_bad_batch_of_one_rank_ends_the_training_of_all_at_once_and_another_can_begin(pools):
    other = "rank=1: could not give its batch"
    said = "field of a batch=t: holds float64 where keys are whole numbers"
    assert pools[2].run(_with_a_bad_batch, "float") == [other, said]
    assert pools[2].run(_with_a_bad_batch, "lost") == [other, "disk gone"]
    assert len(set(pools[2].run(_train, [[3], [3]]))) == 1


class Frozen(Sum):
    """Parts that no gradient comes to."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.fixed = torch.nn.Parameter(torch.full((2, 2), 1.0 + rank).T, requires_grad=False)
        self.register_buffer("mask", torch.tensor([rank == 0, True]))

    def forward(self, vectors, batch):
        loss, weight = super().forward({"t": (vectors["t"] @ self.fixed) * self.mask}, batch)
        return loss, weight


def _frozen(topology) -> tuple[list, list]:
    model = Frozen(topology.rank)
    nestrec.TrainingPipeline(model, [nestrec.Table("t", rows=9, dim=2)], topology=topology).close()
    return model.fixed.tolist(), model.mask.tolist()


def test_frozen_weights_and_buffers_are_those_of_the_first_rank_too(pools):
    assert pools[2].run(_frozen) == [([[1.0, 1.0], [1.0, 1.0]], [True, True])] * 2


def _different(topology, what) -> None:
    dim = 2 + topology.rank * (what == "table")
    model = torch.nn.Linear(1 + topology.rank * (what == "shape"), 1)
    model.bias.requires_grad_(topology.rank == 0 or what != "learns")
    nestrec.TrainingPipeline(model, [nestrec.Table("t", rows=9, dim=dim)], topology=topology)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("table", "tables[0].dim=2: rank 1 differs from rank 0 (3)"),
        ("shape", "weights of the model.weight.shape[1]=1: rank 1 differs from rank 0 (2)"),
        ("learns", "weights of the model.bias.learns=True: rank 1 differs from rank 0 (False)"),
    ],
)
def test_what_differs_between_ranks_is_named(pools, what, words):
    assert [words in failure.text for failure in pools[2].outcomes(_different, what)] == [True, True]


def _on_own_disks(topology, folders) -> str:
    store = nestrec.embedding.StoreConfig(kind="disk", folder=folders[topology.rank])
    table = nestrec.Table("t", rows=9, dim=2, store=store)
    pipeline = nestrec.TrainingPipeline(Sum(), [table], topology=topology)
    pipeline.step({"t": np.arange(4)})
    digest = pipeline.digest()
    pipeline.close()
    return digest


def test_every_rank_may_have_a_disk_of_its_own(pools, tmp_path):
    folders = [str(tmp_path / name) for name in ("a", "b")]
    assert len(set(pools[2].run(_on_own_disks, folders))) == 1


def _saved_or_restored(topology, folder, steps) -> tuple[str, dict | None, float]:
    model = Sum()
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    table = nestrec.Table("t", rows=9, dim=2, optimizer="adam")
    dynamic = nestrec.Table("u", rows=None, dim=2)
    pipeline = nestrec.TrainingPipeline(model, [table, dynamic], dense_optimizer=adam, topology=topology)
    saved = nestrec.PipelineCheckpoints(pipeline, folder)
    state = saved.restore()
    for step in range(pipeline.number, steps):
        pipeline.step({"t": np.arange(3) + step, "u": np.array([step, 10**12 + step, topology.rank])})
        adam.param_groups[0]["lr"] *= 0.5
    saved.save({"steps": steps})
    found = pipeline.digest(), state, adam.param_groups[0]["lr"]
    pipeline.close()
    return found


def test_what_two_ranks_saved_is_taken_back_by_one_and_by_two(pools, tmp_path):
    (first, nothing, rate), _ = pools[2].run(_saved_or_restored, str(tmp_path), 3)
    assert nothing is None
    again = pools[2].run(_saved_or_restored, str(tmp_path), 3)
    assert again == [(first, {"steps": 3}, rate)] * 2
    assert _saved_or_restored(Topology.single(), str(tmp_path), 3) == (first, {"steps": 3}, rate)
