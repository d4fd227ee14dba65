"""Trains a custom model on two sharded tables, twice on the same batches: `nested` is bitwise identical to `serial`.

torchrun --standalone --nproc_per_node 2 examples/own_model.py
"""

from collections.abc import Iterator

import torch
from torch import nn

import nestrec

STEPS, SAMPLES, ITEMS, DIM = 20, 32, 5000, 16


class NextItem(nn.Module):
    """GRU over the history, initialized with the user's vector; scores the next item against a random one."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(DIM, DIM, batch_first=True)

    def forward(self, vectors: dict, batch: dict) -> tuple[torch.Tensor, int]:
        packed = nn.utils.rnn.pack_sequence(vectors["history"].rows(), enforce_sorted=False)
        state = self.gru(packed, vectors["user"][None])[1][0]
        scores = torch.einsum("bd,bcd->bc", state, vectors["candidates"])
        losses = nn.functional.cross_entropy(scores, batch["label"], reduction="none")
        return losses.sum(), len(losses)


def batches(rank: int) -> Iterator[dict]:
    """Yield batches of users who walk along the items; the label is the index of the next item among two candidates."""
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(1000 * rank + step)
        user = torch.randint(100, (SAMPLES,), generator=draw)
        lengths = torch.randint(2, 9, (SAMPLES,), generator=draw)
        walks = [10 * u + torch.arange(n) for u, n in zip(user, lengths.tolist(), strict=True)]
        label = torch.randint(2, (SAMPLES,), generator=draw)
        candidates = torch.randint(ITEMS, (SAMPLES, 2), generator=draw)
        candidates[torch.arange(SAMPLES), label] = 10 * user + lengths
        yield {"user": user, "history": nestrec.Jagged.from_rows(walks), "candidates": candidates, "label": label}


def train(schedule: str) -> tuple[list[float], str]:
    torch.manual_seed(0)
    model = NextItem()
    adam = torch.optim.Adam(model.parameters(), lr=0.02)
    items = nestrec.Table("items", rows=ITEMS, dim=DIM, optimizer="adam", features=("history", "candidates"))
    users = nestrec.Table("users", rows=None, dim=DIM, features=("user",))  # adds a row when a key is first used
    pipeline = nestrec.TrainingPipeline(
        model, [items, users], dense_optimizer=adam, schedule=schedule, micro_batches=4, table_learning_rate=0.05
    )
    losses = [float(loss) for loss in pipeline.run(batches(pipeline.topology.rank))]
    return losses, pipeline.digest()


if __name__ == "__main__":
    (serial, expected), (nested, digest) = train("serial"), train("nested")
    assert (nested, digest) == (serial, expected), "the schedules must give bitwise identical results"
    print(f"loss {serial[0]:.4f} -> {serial[-1]:.4f}; tables and weights are bitwise identical: {digest[:16]}")
