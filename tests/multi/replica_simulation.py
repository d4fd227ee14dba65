"""Reference implementation of weight averaging over replica groups: one process, and every row is averaged."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from schedule_jobs import Job, Tiny, batches_of, tables_of, tiny_loss

from nestrec.data.batch_loader import Batch
from nestrec.distributed import Topology
from nestrec.embedding import EmbeddingEngine
from nestrec.pipeline.dense.dense_optimizer import DenseOptimizer, OptimizerConfig
from nestrec.pipeline.exchange_window import ExchangeWindow, LossCompute


class Group:
    """A replica group whose ranks and shards are simulated by one engine."""

    def __init__(self, job: Job, replica: int, world: int) -> None:
        self.job = job
        self.engine = EmbeddingEngine(tables_of(job), Topology.single())
        self.model = Tiny().to(getattr(torch, job.dtype))
        self.dense = DenseOptimizer(self.model, OptimizerConfig(), Topology.single(), torch.device("cpu"))
        shards = world // job.ranks.num_replicas
        self._batches = [_batches_of_rank(job, replica * shards + s, world) for s in range(shards)]

    def step(self, number: int, rate: float) -> torch.Tensor:
        """Run a training step of this group without averaging, and return the loss.

        Gradients of a row are added in the order (micro-batch, source rank).
        """
        batches = [next(iterator) for iterator in self._batches]
        parts = [part for group in zip(*(b.micro_batches for b in batches), strict=True) for part in group]
        routed = self.engine.route(*[part.keys for part in parts], window_cache=self.job.window_cache)
        working = self.engine.fetch_rows(routed, step=number)
        window = ExchangeWindow(self.engine, routed, working)
        compute = LossCompute(tiny_loss(self.model), torch.device("cpu"))
        loss = torch.zeros(())
        for i, part in enumerate(parts):
            window.receive(i)
            part_loss, gradients = compute.forward_backward(
                part, window.vectors(i), routed.micro_batches[i].index, batches[0].weight
            )
            loss = loss + part_loss
            window.store_gradients(i, gradients)
            window.send(i)
        for table in working.tables.values():
            assert table.gradient is not None
            table.gradient = table.gradient * self.job.ranks.num_replicas  # mean over the samples of this group
        self.engine.update_rows(working, learning_rate=rate)
        self.engine.write_back(working)
        return loss


def _batches_of_rank(job: Job, rank: int, world: int) -> Iterator[Batch]:
    return batches_of(job, replace(Topology.single(), rank=rank, world=world), 1)


def average(groups: list[Group], step: int, *, with_state: bool) -> None:
    for name in groups[0].engine.tables:
        shards = [group.engine.shards[name] for group in groups]
        keys = np.unique(np.concatenate([shard.key_index.rows_since(-1)[0] for shard in shards]))
        fetched = [shard.fetch_rows(keys, step) for shard in shards]
        layout = shards[0].layout
        for column in layout.columns if with_state else layout.columns[:1]:
            copies = [layout.view(rows.rows, column.name).clone() for rows in fetched]
            mean = copies[0] + sum(copy - copies[0] for copy in copies[1:]) * (1 / len(copies))
            for rows in fetched:
                layout.view(rows.rows, column.name).copy_(mean)
        for shard, rows in zip(shards, fetched, strict=True):
            shard.write_back(rows)


def simulate(job: Job, world: int) -> list[dict[str, Any]]:
    """Return the expected result of `schedule_jobs.train` for each replica group."""
    groups = [Group(job, replica, world) for replica in range(job.ranks.num_replicas)]
    losses = []
    states = {}
    for number in range(1, job.num_steps + 1):
        group_losses = [group.step(number, 0.1 / number**0.5) for group in groups]
        for replicas in zip(*(group.model.parameters() for group in groups), strict=True):
            total = sum(p.grad if p.grad is not None else torch.zeros_like(p) for p in replicas)
            for parameter in replicas:
                parameter.grad = total.clone()
        sums = torch.stack([sum(loss.double() for loss in group_losses), torch.zeros((), dtype=torch.float64)])
        totals = [group.dense.apply(sums, job.dense_rate / number**0.5) for group in groups]
        losses.append(float(totals[0].loss))
        is_fence = number == job.num_steps or number in job.fences
        period = job.replica_sync.every_steps
        if number % period == 0 or is_fence:
            average(
                groups, number, with_state=is_fence or number % (period * job.replica_sync.state_every_averages) == 0
            )
        if is_fence:
            states[number] = [[group.engine.digest(name) for name in group.engine.tables] for group in groups]
    return [
        {"losses": losses, "fence_states": {n: tables[r] for n, tables in states.items()}} for r in range(len(groups))
    ]
