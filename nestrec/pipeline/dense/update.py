"""The dense side of an update: gradients summed over ranks, then AdamW, or an optimiser of torch's."""

from collections.abc import Mapping

import torch
from torch import nn

from nestrec.base.errors import UserError
from nestrec.distributed import Topology
from nestrec.distributed.dense_sync import DenseSync
from nestrec.distributed.exchange import all_reduce_sum
from nestrec.embedding.flight.row_watch import RowWatch
from nestrec.pipeline.dense.adamw import AdamW
from nestrec.pipeline.dense.options import OptimizerConfig
from nestrec.pipeline.dense.torch_optimizer import TorchOptimizer
from nestrec.pipeline.stages import Totals

_STATE = "optimizer/"


class DenseUpdate:
    """Dense weights, their optimiser and their synchronisation."""

    def __init__(
        self, model: nn.Module, optimizer: OptimizerConfig | torch.optim.Optimizer, topology: Topology,
        device: torch.device, row_watch: RowWatch | None = None,
    ):  # fmt: skip
        """row_watch: of the rows on this rank; what all ranks have seen travels with the sums."""
        self._named = dict(model.named_parameters())
        self._device, self._topology, self._row_watch = device, topology, row_watch
        self._optimizer = (
            AdamW(self._named, optimizer, device)
            if isinstance(optimizer, OptimizerConfig)
            else TorchOptimizer(self._named, optimizer)
        )
        self._sync = DenseSync(list(self._named.values()), topology.dense)

    def share_first(self) -> None:
        """Every rank takes the weights of the first. Collective."""
        self._sync.broadcast_parameters()

    def reduce(self, loss: torch.Tensor, wants_stop: bool) -> torch.Tensor:
        """Sum gradients over ranks in place, and (loss, wish to stop, watch of each table). Collective."""
        # A fill and not a copy: the host would wait for the device to take a number from pageable memory.
        wish = torch.full((), float(wants_stop), device=self._device, dtype=torch.float64)
        sums = torch.stack([loss.double(), wish])
        if self._row_watch is not None:
            sums = torch.cat([sums, self._row_watch.seen()])
        for parameter in self._named.values():
            if (
                parameter.requires_grad and parameter.grad is None
            ):  # no sample reached it here; one rank must do as many do
                parameter.grad = torch.zeros_like(parameter)
        self._sync.reduce()
        all_reduce_sum(self._topology.dense, sums)
        return sums

    def apply(self, sums: torch.Tensor, learning_rate: float) -> Totals:
        """Update once with what `reduce` has summed, and clear the gradients."""
        norm = nn.utils.get_total_norm([p.grad for p in self._named.values() if p.grad is not None])
        self._optimizer.step(learning_rate)
        self._optimizer.clear_gradients()
        return Totals(loss=sums[0], gradient_norm=norm, wants_stop=sums[1], rows=sums[2:])

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights and optimiser state by name."""
        found = {f"model/{name}": p.detach() for name, p in self._named.items()}
        for name, state in self._optimizer.state.items():
            found |= {f"{_STATE}{name}/{part}": value for part, value in state.items()}
        return found

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take back what `tensors` gave."""
        _check_same_model(self._named, tensors)
        with torch.no_grad():
            for name, parameter in self._named.items():
                parameter.copy_(tensors[f"model/{name}"])
        saved: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith(_STATE):
                weight, _, part = name.removeprefix(_STATE).rpartition("/")
                saved.setdefault(weight, {})[part] = tensor
        self._optimizer.load(saved)


def _check_same_model(named: Mapping[str, nn.Parameter], tensors: Mapping[str, torch.Tensor]) -> None:
    saved = {name.removeprefix("model/"): list(tensors[name].shape) for name in tensors if name.startswith("model/")}
    wanted = {name: list(parameter.shape) for name, parameter in named.items()}
    for name in sorted(saved.keys() | wanted.keys()):
        if saved.get(name) != wanted.get(name):
            raise UserError(
                f"the checkpoint is of another model: it has {saved.get(name)}", field=f"shape of {name}",
                value=wanted.get(name), remedy="train into another folder (--output), or with its config.json",
            )  # fmt: skip
