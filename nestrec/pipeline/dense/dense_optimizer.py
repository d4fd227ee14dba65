"""Optimizer of dense weights: gradient all-reduce, then AdamW or a torch optimizer.

`OptimizerConfig` holds the options: learning-rate schedule (warmup and decay), gradient clipping (`max_grad_norm`),
weight decay and an exponential moving average (EMA) of the weights. `DenseOptimizer` sums gradients over ranks and
applies the update. `TorchOptimizerAdapter` wraps any `torch.optim.Optimizer` instead of AdamW.

`AdamW` calls torch's functional update and not its Optimizer class: creating a `torch.optim.Optimizer` imports the
compiler of torch (and triton), which takes as long as importing torch itself, in every process that trains, measures or
exports.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.adamw import adamw

from nestrec.base.compat import foreach_lerp_, foreach_mul_, unsaved_buffers
from nestrec.base.config import config
from nestrec.base.config_values import Decay, Fraction, Natural, NonNegative, Positive
from nestrec.base.cuda import record_stream_use
from nestrec.base.errors import UserError
from nestrec.distributed import Topology
from nestrec.distributed.collectives import GradientReducer, Sum, assert_same_on_all_ranks
from nestrec.embedding.routing.working_set import FiniteRowCheck
from nestrec.pipeline.dense.fsdp_layers import FSDPLayers
from nestrec.pipeline.schedule_types import LearningRates, StepTotals


@config
class OptimizerConfig:
    """Options of the optimizer of dense weights (AdamW) and of the learning rates."""

    learning_rate: NonNegative = 1e-3
    """Learning rate of the dense weights (AdamW)."""
    table_learning_rate: NonNegative | None = None
    """Learning rate of the embedding tables. None: `learning_rate`."""
    beta1: Decay = 0.9
    """AdamW: decay of the moving average of gradients."""
    beta2: Decay = 0.98
    """AdamW: decay of the moving average of squared gradients."""
    eps: NonNegative = 1e-8
    """AdamW: term added to the denominator for numerical stability."""
    weight_decay: NonNegative = 0.0
    """AdamW: weight decay coefficient of the dense weights; tables do not decay."""
    weight_decay_on: Literal["all", "matrices"] = "all"
    """Dense weights that decay: all, or matrices only (weights with two or more dimensions, not biases and scales of
    norms)."""
    max_grad_norm: Positive | None = None
    """Maximum norm of the gradient of all dense weights (gradient clipping); the norm is computed after the gradient
    was summed over ranks and micro-batches. Gradients of tables are not included. None disables clipping."""
    warmup_steps: Natural = 0
    """Number of steps over which both learning rates grow linearly from 0."""
    lr_schedule: Literal["none", "linear", "cosine"] = "none"
    """Decay of both learning rates after the warmup, over `lr_decay_steps`."""
    lr_decay_steps: Natural = 0
    """Number of steps after the warmup over which the learning rates decay; then they stay constant."""
    final_lr_fraction: Fraction = 0.0
    """Fraction of the learning rates that is left after the decay."""
    ema_decay: Decay | None = None
    """Decay of the exponential moving average (EMA) of the dense weights, which is evaluated, exported and published
    instead of the weights. None disables it. Tables do not have an average."""

    def __post_init__(self) -> None:
        if (self.lr_schedule == "none") != (self.lr_decay_steps == 0):
            raise UserError(
                "lr_schedule and lr_decay_steps must be set together",
                option="optimizer.lr_schedule",
                value=f"{self.lr_schedule}, lr_decay_steps={self.lr_decay_steps}",
                remedy="set both a decay (linear or cosine) and lr_decay_steps, or neither",
            )

    def rates(self, step: int) -> LearningRates:
        """Return the learning rates of a step; steps are counted from 1."""
        factor = min(1.0, step / self.warmup_steps) if self.warmup_steps else 1.0
        if self.lr_schedule != "none":
            factor *= self._decay_factor(min(1.0, max(0, step - self.warmup_steps) / self.lr_decay_steps))
        tables = self.learning_rate if self.table_learning_rate is None else self.table_learning_rate
        return LearningRates(dense=self.learning_rate * factor, tables=tables * factor)

    def _decay_factor(self, progress: float) -> float:
        falling = 1.0 - progress if self.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.final_lr_fraction + (1.0 - self.final_lr_fraction) * falling


class TorchOptimizerAdapter:
    """Wraps a `torch.optim.Optimizer` over the weights of a model; learning rates are those of its parameter groups."""

    def __init__(self, named: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        self._named = named
        self._optimizer = optimizer

    @property
    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Tensors of the optimizer state, by name of the weight."""
        state = self._optimizer.state
        return {
            name: {part: value for part, value in state[weight].items() if isinstance(value, torch.Tensor)}
            for name, weight in self._named.items()
            if weight in state
        }

    def step(self, learning_rate: float) -> None:
        """Update the weights once. `learning_rate` is ignored: it is for `AdamW`."""
        self._optimizer.step()

    def clear_gradients(self) -> None:
        for weight in self._named.values():
            weight.grad = None

    def load(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Replace the optimizer state by a copy of `state`."""
        self._optimizer.state.clear()
        for name, parts in state.items():
            weight = self._named[name]
            counts_on_host = not any(self._group_of(weight).get(option) for option in ("capturable", "fused"))
            self._optimizer.state[weight] = {
                part: value.clone() if part == "step" and counts_on_host else value.to(weight.device, copy=True)
                for part, value in parts.items()
            }

    def settings(self) -> dict[str, Any]:
        """Return the non-tensor state as JSON values: numbers per group, such as learning rates, and per weight."""
        state = self._optimizer.state
        groups = self._optimizer.param_groups
        numbers = {name: _plain_of(state[weight]) for name, weight in self._named.items() if weight in state}
        return {
            "kind": type(self._optimizer).__name__,
            "groups": [_settings_of(group) for group in groups],
            "of": numbers,
        }

    def load_settings(self, settings: Mapping[str, Any]) -> None:
        """Restore the result of `settings`; call it after `load`."""
        for group, saved in zip(self._optimizer.param_groups, settings["groups"], strict=True):
            for name, value in saved.items():
                if isinstance(group.get(name), torch.Tensor):
                    group[name].fill_(value)
                else:
                    group[name] = tuple(value) if isinstance(value, list) else value
        for name, numbers in settings["of"].items():
            self._optimizer.state[self._named[name]].update(numbers)

    def _group_of(self, weight: nn.Parameter) -> Mapping[str, Any]:
        return next(
            group for group in self._optimizer.param_groups if any(weight is other for other in group["params"])
        )


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON settings of a parameter group; tensors with one element, such as learning rates, as numbers."""
    single = {n: v.item() if isinstance(v, torch.Tensor) and v.dim() == 0 else v for n, v in group.items()}
    return _plain_of({name: value for name, value in single.items() if name != "params"})


def _plain_of(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(isinstance(part, int | float) for part in value)
    return value is None or isinstance(value, bool | int | float)


_STATE, _MEAN = "optimizer/", "mean/"
STATE = ("step", "exp_avg", "exp_avg_sq")


class AdamW:
    """AdamW over named weights. On a GPU, one fused kernel updates all weights; on a CPU, foreach operations do."""

    def __init__(self, named: Mapping[str, nn.Parameter], cfg: OptimizerConfig, device: torch.device):
        self._named = named
        self._cfg = cfg
        self._is_fused = device.type == "cuda"
        self.state: dict[str, dict[str, torch.Tensor]] = {}
        """State tensors (`STATE`) by name of the weight; empty before the first step."""

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update the weights once; weights without a gradient are not changed."""
        gradients = {name: weight.grad for name, weight in self._named.items() if weight.grad is not None}
        for name in gradients:
            if name not in self.state:
                self.state[name] = self._initial_state(self._named[name])
        decaying = {name for name in gradients if self._decays(name)}
        for names, weight_decay in ((decaying, self._cfg.weight_decay), (gradients.keys() - decaying, 0.0)):
            if names:
                self._update(
                    {name: gradients[name] for name in gradients if name in names}, learning_rate, weight_decay
                )

    def _decays(self, name: str) -> bool:
        return self._cfg.weight_decay_on == "all" or self._named[name].dim() > 1

    def _update(self, gradients: Mapping[str, torch.Tensor], learning_rate: float, weight_decay: float) -> None:
        names = list(gradients)
        weights: list[torch.Tensor] = [self._named[name] for name in names]
        steps, means, squares = ([self.state[name][part] for name in names] for part in STATE)
        adamw(
            weights,
            list(gradients.values()),
            means,
            squares,
            [],
            steps,
            foreach=not self._is_fused,
            fused=self._is_fused,
            amsgrad=False,
            beta1=self._cfg.beta1,
            beta2=self._cfg.beta2,
            lr=learning_rate,
            weight_decay=weight_decay,
            eps=self._cfg.eps,
            maximize=False,
        )

    def clear_gradients(self) -> None:
        for weight in self._named.values():
            weight.grad = None

    def load(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Replace the optimizer state by a copy of `state`."""
        self.state = {
            name: {part: value.to(self._device_of(part, self._named[name])) for part, value in parts.items()}
            for name, parts in state.items()
        }

    def _initial_state(self, weight: nn.Parameter) -> dict[str, torch.Tensor]:
        precise = torch.float32 if self._is_fused else torch.get_default_dtype()
        step = torch.zeros((), dtype=precise, device=self._device_of("step", weight))
        return {"step": step, "exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}

    def _device_of(self, part: str, weight: nn.Parameter) -> torch.device:
        """Return the device of a state tensor: step counts are on the host, except for the fused kernel."""
        return torch.device("cpu") if part == "step" and not self._is_fused else weight.device


class DenseOptimizer:
    """Optimizer of the dense weights of a model, data-parallel (DDP) or fully sharded (FSDP).

    Implements `DenseSide`: sums gradients over ranks, clips them, updates the weights and their moving average.

    Args:
        model: Model whose weights are trained.
        optimizer: Options of AdamW, or a torch optimizer over the weights of the model.
        topology: Ranks and their communicators.
        device: Device of the weights.
        row_watch: Check for non-finite table rows on this rank; its results are all-reduced with the gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerConfig | torch.optim.Optimizer,
        topology: Topology,
        device: torch.device,
        row_watch: FiniteRowCheck | None = None,
    ):
        self.sharded = FSDPLayers.create(model, topology)
        """FSDP layers; None if all weights are replicated."""
        sharded = {} if self.sharded is None else self.sharded.local_slices
        # This rank updates its slices of sharded weights, and all replicated weights.
        self._named = {name: sharded.get(name, p) for name, p in model.named_parameters()}
        self._model = model
        self._control = topology.control
        self._trainable = self._trainable_names()
        self._device = device
        self._row_watch = row_watch
        self._optimizer = (
            AdamW(self._named, optimizer, device)
            if isinstance(optimizer, OptimizerConfig)
            else self._torch_optimizer(optimizer)
        )
        ranks = topology.options
        # FSDP backward passes are collective, so no all-reduce may start during them.
        self._sync = GradientReducer(
            [weight for name, weight in self._named.items() if name not in sharded],
            topology.dense,
            int(ranks.grad_bucket_mib * (1 << 20)),
            overlaps_backward=ranks.overlap_grad_reduce and not sharded,
        )
        cfg = optimizer if isinstance(optimizer, OptimizerConfig) else OptimizerConfig()
        self._clip_norm = cfg.max_grad_norm
        self._ema_decay = cfg.ema_decay
        self._means = {} if self._ema_decay is None else {n: p.detach().clone() for n, p in self._named.items()}

    def _torch_optimizer(self, optimizer: torch.optim.Optimizer) -> TorchOptimizerAdapter:
        if self.sharded is not None:
            raise UserError(
                "a torch optimizer does not support sharded weights",
                option="parallel.dense",
                value="fsdp",
                remedy="use an OptimizerConfig, or set parallel.dense=replicated",
            )
        return TorchOptimizerAdapter(self._named, optimizer)

    def broadcast_weights(self) -> None:
        """Broadcast the weights and buffers of the first rank. Collective."""
        buffers = dict(self._model.named_buffers())
        tensors = (*self._named.items(), *buffers.items())
        layout = {name: {"shape": list(tensor.shape), "learns": tensor.requires_grad} for name, tensor in tensors}
        assert_same_on_all_ranks(self._control, "weights of the model", layout)
        self._sync.broadcast_parameters(buffers.values())
        self._reset_means()

    def _reset_means(self) -> None:
        for name, mean in self._means.items():
            mean.copy_(self._named[name].detach())

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Make the model use the moving average of its weights inside the block, unsharded on every rank. Collective.

        Without `ema_decay`, the model uses its weights. Must be called between steps.
        """
        self._swap_means_and_weights()
        try:
            with contextlib.nullcontext() if self.sharded is None else self.sharded.unsharded():
                yield
        finally:
            self._swap_means_and_weights()

    def _swap_means_and_weights(self) -> None:
        for name, mean in self._means.items():
            weight = self._named[name]
            if self._is_slice(name):  # the FSDP layer references the memory of its slice
                before = weight.detach().clone()
                weight.data.copy_(mean)
                mean.copy_(before)
            else:
                weight.data, self._means[name] = mean, weight.data

    @property
    def local_weights(self) -> Mapping[str, nn.Parameter]:
        """Weights that this rank updates, by name: replicated weights, and its slices of sharded ones."""
        return self._named

    def _is_slice(self, name: str) -> bool:
        return self.sharded is not None and name in self.sharded.local_slices

    def overlap_backward(self, submit: Callable[[Sum], None]) -> contextlib.AbstractContextManager[None]:
        """Return a context for the last micro-batch that overlaps gradient all-reduce with its backward pass."""
        return self._sync.overlap_backward(submit) if self._sync.overlaps_backward else contextlib.nullcontext()

    def reduce(self, loss: torch.Tensor, stop_requested: bool) -> torch.Tensor:
        """Sum gradients (in place), loss, stop requests and non-finite rows over ranks. Collective (all-reduce)."""
        # A fill and not a copy: for a copy from pageable memory, the host would wait for the device.
        stop = torch.full((), float(stop_requested), device=self._device, dtype=torch.float64)
        figures = [loss.double(), stop]
        if self.sharded is not None:
            self.sharded.take_gradients()
            figures.append(self.sharded.squared_gradient_norm())
        self._check_trainable()
        sums = torch.stack(figures)
        if self._row_watch is not None:
            sums = torch.cat([sums, self._row_watch.non_finite_markers()])
        for parameter in self._named.values():
            # A weight that no sample of this rank has reached still takes part in the all-reduce.
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._sync.reduce(sums)
        return sums

    def _trainable_names(self) -> set[str]:
        return {name for name, weight in self._named.items() if weight.requires_grad}

    def _check_trainable(self) -> None:
        """Raise a UserError if `requires_grad` of a weight has changed.

        Gradients are all-reduced for the weights that were trainable at the start; others would differ between ranks.
        """
        if changed := sorted(self._trainable ^ self._trainable_names()):
            raise UserError(
                "requires_grad has changed since the start of training",
                option="weight of the model",
                value=changed[0],
                remedy="freeze or unfreeze weights first, then build a new TrainingPipeline "
                "(nestrec.PipelineCheckpoints restores its state), or set the learning rate of the weight to 0",
            )

    def apply(self, sums: torch.Tensor, learning_rate: float) -> StepTotals:
        """Clip the gradients, update the weights once and clear the gradients.

        Args:
            sums: Result of `reduce`.
            learning_rate: Learning rate of the step; a torch optimizer ignores it.
        """
        gradients = [p.grad for p in self._named.values() if p.grad is not None]
        record_stream_use(gradients)  # they were written on the stream of the communication lane
        norm, figures = self._norm(sums)
        if self._clip_norm is not None and gradients:
            # On the device, so that the host does not wait for the norm. A factor of 1 does not change a bit.
            foreach_mul_(gradients, (self._clip_norm / norm).clamp(max=1.0).to(gradients[0].dtype))
        self._optimizer.step(learning_rate)
        self._optimizer.clear_gradients()
        if self._ema_decay is not None:
            with torch.no_grad():
                foreach_lerp_(list(self._means.values()), list(self._named.values()), 1.0 - self._ema_decay)
        return StepTotals(loss=sums[0], gradient_norm=norm, stop_requested=sums[1], rows=sums[figures:])

    def _norm(self, sums: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return the norm of all gradients, and the index of the first sum about table rows."""
        replicated = [p.grad for name, p in self._named.items() if p.grad is not None and not self._is_slice(name)]
        norm = nn.utils.get_total_norm(replicated)
        return (norm, 2) if self.sharded is None else ((norm.double().square() + sums[2]).sqrt().to(norm.dtype), 3)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the unsharded weights, optimizer state and moving averages by name. Collective with FSDP."""
        tensors = {f"model/{name}": self._gather(name, p.detach()) for name, p in self._named.items()}
        for name, state in self._optimizer.state.items():
            tensors |= {f"{_STATE}{name}/{part}": self._gather(name, value) for part, value in state.items()}
        return tensors | {f"{_MEAN}{name}": self._gather(name, mean) for name, mean in self._means.items()}

    def _gather(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """Return the unsharded tensor of a weight, or of state in its shape; step counts are the same on all ranks."""
        if self.sharded is None or name not in self.sharded.local_slices or local.dim() == 0:
            return local
        return self.sharded.all_gather(name, local)

    def _local_slice(self, name: str, unsharded: torch.Tensor) -> torch.Tensor:
        if self.sharded is None or name not in self.sharded.local_slices or unsharded.dim() == 0:
            return unsharded
        return self.sharded.slice_of(unsharded)

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the persistent buffers of the model on this rank, such as the running statistics of BatchNorm."""
        owner_and_name = ((name, *name.rpartition(".")[::2]) for name, _ in self._model.named_buffers())
        unsaved = {n for n, owner, leaf in owner_and_name if leaf in unsaved_buffers(self._model.get_submodule(owner))}
        return {name: buffer for name, buffer in self._model.named_buffers() if name not in unsaved}

    def settings(self) -> dict[str, Any]:
        """Return the non-tensor state of the optimizer as JSON values."""
        if isinstance(self._optimizer, AdamW):
            return {"kind": type(self._optimizer).__name__}
        return self._optimizer.settings()

    def load_settings(self, settings: Mapping[str, Any]) -> None:
        """Restore the result of `settings`; call it after `load`."""
        if not isinstance(self._optimizer, AdamW):
            self._optimizer.load_settings(settings)

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore the optimizer state that `tensors` returned.

        Raises:
            UserError: The tensors are those of another model.
        """
        shapes = {name: list(parameter.shape) for name, parameter in self._named.items()}
        _check_same_model(shapes if self.sharded is None else shapes | self.sharded.unsharded_shapes(), tensors)
        with torch.no_grad():
            for name, parameter in self._named.items():
                parameter.copy_(self._local_slice(name, tensors[f"model/{name}"]))
        saved: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith(_STATE):
                weight, _, part = name.removeprefix(_STATE).rpartition("/")
                saved.setdefault(weight, {})[part] = self._local_slice(weight, tensor)
        self._optimizer.load(saved)
        self._reset_means()  # the checkpoint may be of a run without moving averages
        for name, mean in self._means.items():
            if (stored := tensors.get(f"{_MEAN}{name}")) is not None:
                mean.copy_(self._local_slice(name, stored))


def _check_same_model(expected: Mapping[str, list[int]], tensors: Mapping[str, torch.Tensor]) -> None:
    saved = {name.removeprefix("model/"): list(tensors[name].shape) for name in tensors if name.startswith("model/")}
    for name in sorted(saved.keys() | expected.keys()):
        if saved.get(name) != expected.get(name):
            raise UserError(
                f"the checkpoint is of a different model, with the shape {saved.get(name)}",
                option=f"shape of {name}",
                value=expected.get(name),
                remedy="use another folder (--output), or the options in the config.json of the checkpoint's run",
            )
