"""Layers of which every rank holds a slice, by torch's `fully_shard`: weights, gradients, moments and running means.

A layer is put together when its forward or its backward pass comes to it, and given up behind it. Backward passes sum
the gradients over ranks and leave each rank the sum of its slice (docs/decisions/sharded-layers.md). The passes are
collective: a rank without samples makes one over a token that counts nothing.
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
from nestrec.distributed.collectives import all_gather_equal, broadcast, losses_named
from nestrec.distributed.topology import Communicator
from nestrec.models.sequence import SequenceInfo

# torch 2.13 has these names for them, and warns at every call by the old ones, the only ones before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Watched:
    """What torch calls inside a pass in the place of its own collectives: the same ones, with a lost peer named."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Watched):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        with losses_named(self._communicator, "layer_all_gather"):
            work = _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        return cast(dist.Work | None, work)


class _ReduceScatter(_Watched):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        with losses_named(self._communicator, "layer_reduce_scatter"):
            work = _reduce_scatter(output_tensor, input_tensor, op, group=group, async_op=async_op)
        return cast(dist.Work | None, work)


class FSDPLayers:
    """Of the encoder of a model. What else the model has is held by every rank."""

    def __init__(self, model: nn.Module, topology: Topology) -> None:
        """Every rank takes the weights of the first. Collective."""
        from torch.distributed.device_mesh import DeviceMesh  # as long again as importing torch.distributed
        from torch.distributed.fsdp import fully_shard

        # Layers hand on parts of one tensor; whoever reads them makes new ones.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        group = topology.dense.group
        assert group is not None, "there is nothing to share among one"
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
        for layer in self._layers:  # losses are sums divided by the global weight: no mean over ranks
            layer.set_gradient_divide_factor(1.0)
            layer.set_force_sum_reduction_for_comms(True)
            layer.set_custom_all_gather(_AllGather(topology.dense))  # type: ignore[arg-type]
            layer.set_custom_reduce_scatter(_ReduceScatter(topology.dense))  # type: ignore[arg-type]
        self._sharded = {name: p for name, p in model.named_parameters() if name in inside}
        self.held = {name: nn.Parameter(_local(p)) for name, p in self._sharded.items()}
        """By name of the weight, this rank's slice: the memory is that of the model."""

    @staticmethod
    def of(model: nn.Module, topology: Topology) -> "FSDPLayers | None":
        """None where every rank holds everything: as asked for, or alone."""
        if topology.options.dense == "replicated" or topology.dense.group is None:
            return None
        return FSDPLayers(model, topology)

    def take_gradients(self) -> None:
        """What backward passes have left, to the slices; zero where there was none."""
        for name, slice_ in self.held.items():
            gradient = self._sharded[name].grad
            slice_.grad = torch.zeros_like(slice_) if gradient is None else _local(gradient)
            self._sharded[name].grad = None

    def square_of_gradients(self) -> torch.Tensor:
        """Of this rank's slices; the sum over ranks is that of the layers' gradients."""
        gradients = [slice_.grad for slice_ in self.held.values() if slice_.grad is not None]
        return nn.utils.get_total_norm(gradients).double().square()

    def empty_pass(self) -> None:
        """The passes of a micro-batch without samples: over one token, whose gradients are zero. Collective."""
        weight = next(self._encoder.parameters())
        token_TD = torch.zeros(1, self._width, dtype=weight.dtype, device=self._device, requires_grad=True)
        nowhere_T = torch.zeros(1, dtype=torch.int64, device=self._device)
        time_T = torch.zeros(1, dtype=torch.float64, device=self._device)
        info = SequenceInfo(
            offsets=torch.tensor([0, 1], device=self._device),
            max_length=1,
            position_T=nowhere_T,
            token_key_T=nowhere_T,
            time_T=time_T,
            query_time_T=time_T,
        )
        (0.0 * self._encoder(token_TD, info)).sum().backward()

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Inside the block every rank has all layers, and passes are no collectives. Entering it is one."""
        for layer in self._layers:
            layer.unshard()
            layer.set_reshard_after_forward(False)
        try:
            yield
        finally:
            for layer in self._layers:
                layer.set_reshard_after_forward(True)
                layer.reshard()

    def gathered(self, name: str, slice_: torch.Tensor) -> torch.Tensor:
        """The whole of which every rank gives the slice that belongs to a weight. Collective."""
        rows = self._sharded[name].shape[0]
        padded = slice_.new_zeros((-(-rows // self._communicator.size), *slice_.shape[1:]))
        padded[: len(slice_)] = slice_
        return torch.cat(all_gather_equal(self._communicator, padded))[:rows]

    def slice_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of something in the shape of a weight."""
        size = -(-len(whole) // self._communicator.size)
        return whole[self._communicator.rank * size :][:size]

    def shapes(self) -> dict[str, list[int]]:
        """Of the whole weights, by name."""
        return {name: list(parameter.shape) for name, parameter in self._sharded.items()}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a distributed tensor, sharing its memory."""
    return tensor.detach().to_local()  # type: ignore[attr-defined,no-any-return]


def _encoder_of(model: nn.Module) -> tuple[nn.Module, nn.ModuleList, int]:
    """The encoder, its layers and their width."""
    encoder = getattr(model, "encoder", None)
    layers, width = getattr(encoder, "layers", None), getattr(getattr(encoder, "cfg", None), "dim", None)
    if not isinstance(encoder, nn.Module) or not isinstance(layers, nn.ModuleList) or not layers or width is None:
        raise UserError(
            "the model has no encoder with `layers` and a `cfg`, which could be shared among ranks",
            option="ranks.dense",
            value="fsdp",
            remedy="set ranks.dense=replicated, or take hstu, fuxi or sasrec",
        )
    return encoder, layers, width
