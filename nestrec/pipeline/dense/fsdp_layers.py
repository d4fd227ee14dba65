"""Fully sharded data parallelism (FSDP) of the encoder's layers, with torch's `fully_shard`.

Every rank holds a slice of the weights, gradients, optimizer moments and moving averages. A layer is all-gathered for
its forward and backward pass and freed afterwards; the backward pass reduce-scatters the gradients
(docs/decisions/fsdp.md). The passes are collective, so a rank without samples runs them over one token whose
gradients are zero.
"""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from nestrec.base.errors import UserError
from nestrec.distributed import Topology
from nestrec.distributed.collectives import all_gather_equal, broadcast, name_peer_loss
from nestrec.distributed.topology import Communicator
from nestrec.models.sequence import SequenceInfo

# torch 2.13 renamed these functions and warns at every call of the old names; earlier versions have the old names only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _WatchedCollective:
    """Collective that torch calls inside a pass instead of its own one; its error names the lost peer."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_WatchedCollective):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        with name_peer_loss(self._communicator, "layer_all_gather"):
            work = _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        return cast(dist.Work | None, work)


class _ReduceScatter(_WatchedCollective):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        with name_peer_loss(self._communicator, "layer_reduce_scatter"):
            work = _reduce_scatter(output_tensor, input_tensor, op, group=group, async_op=async_op)
        return cast(dist.Work | None, work)


class FSDPLayers:
    """FSDP layers of the encoder of a model; the other weights of the model are replicated.

    The weights of the first rank are broadcast. Creating it is collective.

    Args:
        model: Model with an attribute `encoder`, which has `layers` and a `cfg` with the width `dim`.
        topology: Ranks; layers are sharded over those of `topology.dense`.
    """

    def __init__(self, model: nn.Module, topology: Topology) -> None:
        # Imported here, because it takes as long as importing torch.distributed.
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        # Layers return views of one tensor; the code that reads them copies.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        group = topology.dense.group
        assert group is not None, "FSDP requires several ranks"
        self._encoder, layers, self._width = _encoder_of(model)
        self._communicator = topology.dense
        self._device = topology.device
        with torch.no_grad():
            for parameter in layers.parameters():
                broadcast(self._communicator, parameter.data)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        inside = {names[id(parameter)] for parameter in layers.parameters()}
        mesh = DeviceMesh.from_group(group, topology.device.type)
        self._layers = [fully_shard(layer, mesh=mesh, reshard_after_forward=True) for layer in layers]
        for layer in self._layers:  # losses are already divided by the global weight, so gradients are summed
            layer.set_gradient_divide_factor(1.0)
            layer.set_force_sum_reduction_for_comms(True)
            layer.set_custom_all_gather(_AllGather(topology.dense))  # type: ignore[arg-type]
            layer.set_custom_reduce_scatter(_ReduceScatter(topology.dense))  # type: ignore[arg-type]
        self._sharded = {name: p for name, p in model.named_parameters() if name in inside}
        self.local_slices = {name: nn.Parameter(_local(p)) for name, p in self._sharded.items()}
        """This rank's slice of each sharded weight, by name; it shares the memory of the model."""

    @staticmethod
    def create(model: nn.Module, topology: Topology) -> "FSDPLayers | None":
        """Return the FSDP layers; None if `parallel.dense=replicated` or if there is only one rank."""
        if topology.options.dense == "replicated" or topology.dense.group is None:
            return None
        return FSDPLayers(model, topology)

    def take_gradients(self) -> None:
        """Move the gradients of the backward passes to the slices; zeros for weights without a gradient."""
        for name, slice_ in self.local_slices.items():
            gradient = self._sharded[name].grad
            slice_.grad = torch.zeros_like(slice_) if gradient is None else _local(gradient)
            self._sharded[name].grad = None

    def squared_gradient_norm(self) -> torch.Tensor:
        """Return the squared gradient norm of this rank's slices; its sum over ranks is that of the layers."""
        gradients = [slice_.grad for slice_ in self.local_slices.values() if slice_.grad is not None]
        return nn.utils.get_total_norm(gradients).double().square()

    def empty_pass(self) -> None:
        """Run the passes of a micro-batch without samples, over one token whose gradients are zero. Collective."""
        weight = next(self._encoder.parameters())
        token_TD = torch.zeros(1, self._width, dtype=weight.dtype, device=self._device, requires_grad=True)
        zero_T = torch.zeros(1, dtype=torch.int64, device=self._device)
        time_T = torch.zeros(1, dtype=torch.float64, device=self._device)
        info = SequenceInfo(
            offsets=torch.tensor([0, 1], device=self._device),
            max_length=1,
            position_T=zero_T,
            token_key_T=zero_T,
            time_T=time_T,
            query_time_T=time_T,
        )
        (0.0 * self._encoder(token_TD, info)).sum().backward()

    @contextlib.contextmanager
    def unsharded(self) -> Iterator[None]:
        """Unshard all layers inside the block, so that passes are local. Entering the block is collective."""
        for layer in self._layers:
            layer.unshard()
            layer.set_reshard_after_forward(False)
        try:
            yield
        finally:
            for layer in self._layers:
                layer.set_reshard_after_forward(True)
                layer.reshard()

    def all_gather(self, name: str, slice_: torch.Tensor) -> torch.Tensor:
        """Return the unsharded tensor of which every rank passes its slice; `name` is its weight. Collective."""
        rows = self._sharded[name].shape[0]
        padded = slice_.new_zeros((-(-rows // self._communicator.size), *slice_.shape[1:]))
        padded[: len(slice_)] = slice_
        return torch.cat(all_gather_equal(self._communicator, padded))[:rows]

    def slice_of(self, unsharded: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice of a tensor in the shape of a weight."""
        size = -(-len(unsharded) // self._communicator.size)
        return unsharded[self._communicator.rank * size :][:size]

    def unsharded_shapes(self) -> dict[str, list[int]]:
        """Return the shapes of the unsharded weights, by name."""
        return {name: list(parameter.shape) for name, parameter in self._sharded.items()}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, sharing its memory."""
    return tensor.detach().to_local()  # type: ignore[attr-defined,no-any-return]


def _encoder_of(model: nn.Module) -> tuple[nn.Module, nn.ModuleList, int]:
    """Return the encoder, its layers and their width."""
    encoder = getattr(model, "encoder", None)
    layers, width = getattr(encoder, "layers", None), getattr(getattr(encoder, "cfg", None), "dim", None)
    if not isinstance(encoder, nn.Module) or not isinstance(layers, nn.ModuleList) or not layers or width is None:
        raise UserError(
            "the model needs an encoder with `layers` and a `cfg` with the width `dim`",
            option="parallel.dense",
            value="fsdp",
            remedy="set parallel.dense=replicated, or use hstu, fuxi or sasrec",
        )
    return encoder, layers, width
