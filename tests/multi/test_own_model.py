"""Custom models on several ranks."""

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


OUTPUT_LINE = re.compile(r"loss ([\d.]+) -> ([\d.]+); tables and weights are bitwise identical: (\w{16})")


def _run_example(topology: Topology) -> str:
    """Run the example on a rank whose process group exists already, and return its output."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", str(topology.world))
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return output.getvalue()


def check_output(output: str) -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 60
    lines = OUTPUT_LINE.findall(output)
    assert len(lines) == 2, "one line per rank; they may be interleaved"
    assert lines[0] == lines[1], "the ranks agree"
    assert float(lines[0][1]) < 0.9 * float(lines[0][0])


def test_own_model_example_nested_equals_serial(pools):
    check_output("\n".join(pools[2].run(_run_example)))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_own_model_example_runs_under_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(EXAMPLE)]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert completed.returncode == 0, completed.stderr
    check_output(completed.stdout)


class Sum(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(2))

    def forward(self, vectors, batch):
        return (vectors["t"] * self.scale).sum(), len(vectors["t"])


def _train(topology, counts) -> str:
    table = nestrec.Table("t", rows=9, dim=2)
    model = Sum()
    torch.nn.init.constant_(model.scale, 1.0 + topology.rank)  # the weights of rank 0 are broadcast
    pipeline = nestrec.TrainingPipeline(model, [table], schedule="nested", topology=topology, micro_batches=2)
    try:
        for _ in pipeline.run({"t": np.arange(count) + step} for step, count in enumerate(counts[topology.rank])):
            pass
        return pipeline.digest()
    finally:
        pipeline.close()


def test_own_model_unequal_samples_and_broadcast_weights(pools):
    digests = pools[2].run(_train, [[3, 0, 2], [1, 4, 0]])
    assert digests[0] == digests[1]


def test_own_model_rank_with_fewer_batches_is_named(pools):
    failures = pools[2].outcomes(_train, [[3, 2, 1], [3, 2]])
    message = "rank=1: this rank has fewer batches than others"
    assert [message in failure.text for failure in failures] == [True, True]


def _train_with_invalid_batch(topology, kind) -> str:
    def batches():
        for step in range(6):
            if step == 4 and topology.rank == 1 and kind == "read error":
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


def test_own_model_invalid_batch_ends_all_ranks(pools):
    on_rank_0 = "rank=1: this rank failed to produce a batch. See the error of that rank."
    on_rank_1 = "field of a batch=t: keys must be integers, not float64. Convert the keys to int64."
    assert pools[2].run(_train_with_invalid_batch, "float") == [on_rank_0, on_rank_1]
    assert pools[2].run(_train_with_invalid_batch, "read error") == [on_rank_0, "disk gone"]
    assert len(set(pools[2].run(_train, [[3], [3]]))) == 1


class FrozenWeightsModel(Sum):
    """A model with a frozen weight and a buffer."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.fixed = torch.nn.Parameter(torch.full((2, 2), 1.0 + rank).T, requires_grad=False)
        self.register_buffer("mask", torch.tensor([rank == 0, True]))

    def forward(self, vectors, batch):
        loss, weight = super().forward({"t": (vectors["t"] @ self.fixed) * self.mask}, batch)
        return loss, weight


def _frozen(topology) -> tuple[list, list]:
    model = FrozenWeightsModel(topology.rank)
    nestrec.TrainingPipeline(model, [nestrec.Table("t", rows=9, dim=2)], topology=topology).close()
    return model.fixed.tolist(), model.mask.tolist()


def test_own_model_frozen_weights_are_broadcast(pools):
    assert pools[2].run(_frozen) == [([[1.0, 1.0], [1.0, 1.0]], [True, True])] * 2


def _create_different_pipelines(topology, difference) -> None:
    dim = 2 + topology.rank * (difference == "table")
    model = torch.nn.Linear(1 + topology.rank * (difference == "shape"), 1)
    model.bias.requires_grad_(topology.rank == 0 or difference != "learns")
    nestrec.TrainingPipeline(model, [nestrec.Table("t", rows=9, dim=dim)], topology=topology)


@pytest.mark.parametrize(
    ("difference", "message"),
    [
        ("table", "tables[0].dim=2: rank 1 differs from rank 0 (3)"),
        ("shape", "weights of the model.weight.shape[1]=1: rank 1 differs from rank 0 (2)"),
        ("learns", "weights of the model.bias.learns=True: rank 1 differs from rank 0 (False)"),
    ],
)
def test_own_model_differences_between_ranks_are_named(pools, difference, message):
    failures = pools[2].outcomes(_create_different_pipelines, difference)
    assert [message in failure.text for failure in failures] == [True, True]


def _train_on_separate_disks(topology, folders) -> str:
    store = nestrec.embedding.StoreConfig(kind="disk", folder=folders[topology.rank])
    table = nestrec.Table("t", rows=9, dim=2, store=store)
    pipeline = nestrec.TrainingPipeline(Sum(), [table], topology=topology)
    pipeline.step({"t": np.arange(4)})
    digest = pipeline.digest()
    pipeline.close()
    return digest


def test_own_model_checkpoints_on_separate_disks(pools, tmp_path):
    folders = [str(tmp_path / name) for name in ("a", "b")]
    assert len(set(pools[2].run(_train_on_separate_disks, folders))) == 1


def _resume_and_save(topology, folder, steps) -> tuple[str, dict | None, float]:
    model = Sum()
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    table = nestrec.Table("t", rows=9, dim=2, optimizer="adam")
    dynamic = nestrec.Table("u", rows=None, dim=2)
    pipeline = nestrec.TrainingPipeline(model, [table, dynamic], dense_optimizer=adam, topology=topology)
    checkpoints = nestrec.PipelineCheckpoints(pipeline, folder)
    state = checkpoints.restore()
    for step in range(pipeline.number, steps):
        pipeline.step({"t": np.arange(3) + step, "u": np.array([step, 10**12 + step, topology.rank])})
        adam.param_groups[0]["lr"] *= 0.5
    checkpoints.save({"steps": steps})
    result = pipeline.digest(), state, adam.param_groups[0]["lr"]
    pipeline.close()
    return result


def test_own_model_checkpoint_of_two_ranks_loads_on_one_and_two(pools, tmp_path):
    (first, state, rate), _ = pools[2].run(_resume_and_save, str(tmp_path), 3)
    assert state is None
    resumed = pools[2].run(_resume_and_save, str(tmp_path), 3)
    assert resumed == [(first, {"steps": 3}, rate)] * 2
    assert _resume_and_save(Topology.single(), str(tmp_path), 3) == (first, {"steps": 3}, rate)
