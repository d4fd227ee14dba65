"""The dense optimizer: AdamW with gradient clipping, schedules, and torch optimizers.

How weights follow gradients.

An optimiser of torch's in the place of ours.

The dense side of an update: gradients summed over ranks, then AdamW, or an optimiser of torch's.

AdamW is torch's own update without its Optimizer class. Making a `torch.optim.Optimizer` imports the whole compiler of
torch (and triton with it): as long again as importing torch itself, in every process that trains, measures or exports.
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
from nestrec.base.config_values import Decay, Natural, NonNegative, Positive, Share
from nestrec.base.cuda import used_here
from nestrec.base.errors import UserError
from nestrec.distributed import Topology
from nestrec.distributed.collectives import GradientReducer, Sum, agree
from nestrec.embedding.routing.working_set import FiniteRowCheck
from nestrec.pipeline.dense.fsdp_layers import FSDPLayers
from nestrec.pipeline.schedule_types import LearningRates, StepTotals


@config
class OptimizerConfig:
    learning_rate: NonNegative = 1e-3
    """size of an update of the dense weights (AdamW)"""
    table_learning_rate: NonNegative | None = None
    """size of an update of the tables' rows; none takes that of the dense weights"""
    beta1: Decay = 0.9
    """AdamW: decay of the running mean of gradients; nearer to 1 follows them more slowly"""
    beta2: Decay = 0.98
    """AdamW: decay of the running mean of squared gradients; nearer to 1 remembers longer"""
    eps: NonNegative = 1e-8
    """AdamW: added to the root of that mean, so that weights with tiny gradients do not leap"""
    weight_decay: NonNegative = 0.0
    """AdamW: part of a dense weight that is taken away at each update, times the learning rate; tables have none"""
    weight_decay_of: Literal["all", "matrices"] = "all"
    """dense weights that decay: all, or only those of two dimensions and more, not biases and scales of norms"""
    clip_norm: Positive | None = None
    """longest gradient of the dense weights, all of them together: that of the loss of the global batch, so summed over
    ranks and micro-batches before it is measured; a longer one is scaled to it. Rows of tables are no part of it"""
    warmup_steps: Natural = 0
    """steps over which both learning rates grow linearly from 0"""
    decay: Literal["none", "linear", "cosine"] = "none"
    """how both learning rates fall after the warm-up, over `decay_steps`"""
    decay_steps: Natural = 0
    """steps after the warm-up until the rates have fallen to `final_rate` of what they were; they stay there"""
    final_rate: Share = 0.0
    """part of the learning rates that is left after `decay_steps`"""
    ema: Decay | None = None
    """running mean of the dense weights, of which each step keeps this part and takes the rest from the weights:
    evaluated, exported and published in their place. None: the weights themselves. Rows of tables have none"""

    def __post_init__(self) -> None:
        if (self.decay == "none") != (self.decay_steps == 0):
            raise UserError(
                "goes with decay_steps",
                option="optimizer.decay",
                value=f"{self.decay}, decay_steps={self.decay_steps}",
                remedy="give both a decay (linear, cosine) and its decay_steps, or neither",
            )

    def rates(self, step: int) -> LearningRates:
        """Learning rates of a step, from 1."""
        part = min(1.0, step / self.warmup_steps) if self.warmup_steps else 1.0
        if self.decay != "none":
            part *= self._left(min(1.0, max(0, step - self.warmup_steps) / self.decay_steps))
        tables = self.learning_rate if self.table_learning_rate is None else self.table_learning_rate
        return LearningRates(dense=self.learning_rate * part, tables=tables * part)

    def _left(self, progress: float) -> float:
        falling = 1.0 - progress if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.final_rate + (1.0 - self.final_rate) * falling


class TorchOptimizerAdapter:
    """Wraps a `torch.optim.Optimizer` over the weights of a model; its learning rates are its own."""

    def __init__(self, named: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        self._named = named
        self._optimizer = optimizer

    @property
    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """By name of the weight, what the optimiser keeps of it in tensors."""
        held = self._optimizer.state
        return {
            name: {part: value for part, value in held[weight].items() if isinstance(value, torch.Tensor)}
            for name, weight in self._named.items()
            if weight in held
        }

    def step(self, learning_rate: float) -> None:
        """One update. `learning_rate` belongs to our own optimiser and is not looked at."""
        self._optimizer.step()

    def clear_gradients(self) -> None:
        for weight in self._named.values():
            weight.grad = None

    def load(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Take back a copy of `state`; nothing else remains."""
        self._optimizer.state.clear()
        for name, parts in state.items():
            weight = self._named[name]
            counts_on_host = not any(self._group_of(weight).get(option) for option in ("capturable", "fused"))
            self._optimizer.state[weight] = {
                part: value.clone() if part == "step" and counts_on_host else value.to(weight.device, copy=True)
                for part, value in parts.items()
            }

    def settings(self) -> dict[str, Any]:
        """What is no tensor, as JSON has it: numbers of each group, such as learning rates, and of each weight."""
        held = self._optimizer.state
        groups = self._optimizer.param_groups
        numbers = {name: _plain_of(held[weight]) for name, weight in self._named.items() if weight in held}
        return {
            "kind": type(self._optimizer).__name__,
            "groups": [_settings_of(group) for group in groups],
            "of": numbers,
        }

    def load_settings(self, settings: Mapping[str, Any]) -> None:
        """Take back what `settings` gave, after `load`."""
        for group, saved in zip(self._optimizer.param_groups, settings["groups"], strict=True):
            for name, value in saved.items():
                if isinstance(group.get(name), torch.Tensor):
                    group[name].fill_(value)
                else:
                    group[name] = tuple(value) if isinstance(value, list) else value
        for name, numbers in settings["of"].items():
            self._optimizer.state[self._named[name]].update(numbers)

    def _group_of(self, weight: nn.Parameter) -> Mapping[str, Any]:
        return next(group for group in self._optimizer.param_groups if any(weight is own for own in group["params"]))


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Of weights that are updated alike; a tensor, such as the learning rate, as a number."""
    single = {n: v.item() if isinstance(v, torch.Tensor) and v.dim() == 0 else v for n, v in group.items()}
    return _plain_of({name: value for name, value in single.items() if name != "params"})


def _plain_of(held: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in held.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(isinstance(part, int | float) for part in value)
    return value is None or isinstance(value, bool | int | float)


_STATE, _MEAN = "optimizer/", "mean/"
STATE = ("step", "exp_avg", "exp_avg_sq")


class AdamW:
    """Weights with their moments and step counts. On a GPU one kernel updates all, elsewhere lists of tensors."""

    def __init__(self, named: Mapping[str, nn.Parameter], cfg: OptimizerConfig, device: torch.device):
        self._named = named
        self._cfg = cfg
        self._is_fused = device.type == "cuda"
        self.state: dict[str, dict[str, torch.Tensor]] = {}
        """by name of the weight: what STATE names; empty before the first step"""

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """One update with the gradients that are there; weights without one stay as they are."""
        gradients = {name: weight.grad for name, weight in self._named.items() if weight.grad is not None}
        for name in gradients:
            if name not in self.state:
                self.state[name] = self._begin(self._named[name])
        decaying = {name for name in gradients if self._decays(name)}
        for names, weight_decay in ((decaying, self._cfg.weight_decay), (gradients.keys() - decaying, 0.0)):
            if names:
                self._update(
                    {name: gradients[name] for name in gradients if name in names}, learning_rate, weight_decay
                )

    def _decays(self, name: str) -> bool:
        return self._cfg.weight_decay_of == "all" or self._named[name].dim() > 1

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
        """Take back a copy of `state`."""
        self.state = {
            name: {part: value.to(self._device_of(part, self._named[name])) for part, value in parts.items()}
            for name, parts in state.items()
        }

    def _begin(self, weight: nn.Parameter) -> dict[str, torch.Tensor]:
        precise = torch.float32 if self._is_fused else torch.get_default_dtype()
        step = torch.zeros((), dtype=precise, device=self._device_of("step", weight))
        return {"step": step, "exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}

    def _device_of(self, part: str, weight: nn.Parameter) -> torch.device:
        """Step counts stay on the host, except where one kernel updates everything."""
        return torch.device("cpu") if part == "step" and not self._is_fused else weight.device


class DenseOptimizer:
    """Dense weights, their optimiser and their synchronisation."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerConfig | torch.optim.Optimizer,
        topology: Topology,
        device: torch.device,
        row_watch: FiniteRowCheck | None = None,
    ):
        """row_watch: of the rows on this rank; what all ranks have seen travels with the sums."""
        self.sharded = FSDPLayers.of(model, topology)
        """Layers of which this rank holds a slice; none where it holds everything."""
        sharded = {} if self.sharded is None else self.sharded.held
        # What this rank updates: slices where there are some.
        self._named = {name: sharded.get(name, p) for name, p in model.named_parameters()}
        self._model = model
        self._control = topology.control
        self._learning = self._learning_now()
        self._device = device
        self._row_watch = row_watch
        self._optimizer = (
            AdamW(self._named, optimizer, device)
            if isinstance(optimizer, OptimizerConfig)
            else self._torch_optimizer(optimizer)
        )
        ranks = topology.options
        # Beside backward passes that are collective themselves no other sums may begin.
        self._sync = GradientReducer(
            [weight for name, weight in self._named.items() if name not in sharded],
            topology.dense,
            int(ranks.dense_bucket_mib * (1 << 20)),
            begins_early=ranks.dense_overlap and not sharded,
        )
        cfg = optimizer if isinstance(optimizer, OptimizerConfig) else OptimizerConfig()
        self._clip_norm = cfg.clip_norm
        self._mean_part = cfg.ema
        self._means = {} if self._mean_part is None else {n: p.detach().clone() for n, p in self._named.items()}

    def _torch_optimizer(self, optimizer: torch.optim.Optimizer) -> TorchOptimizerAdapter:
        if self.sharded is not None:
            raise UserError(
                "an optimiser of torch's would have to be made over the slices of this rank",
                option="ranks.dense",
                value="fsdp",
                remedy="give an OptimizerConfig, or set ranks.dense=replicated",
            )
        return TorchOptimizerAdapter(self._named, optimizer)

    def share_first(self) -> None:
        """Every rank takes the weights and buffers of the first. Collective."""
        buffers = dict(self._model.named_buffers())
        tensors = (*self._named.items(), *buffers.items())
        told = {name: {"shape": list(tensor.shape), "learns": tensor.requires_grad} for name, tensor in tensors}
        agree(self._control, "weights of the model", told)
        self._sync.broadcast_parameters(buffers.values())
        self._begin_means()

    def _begin_means(self) -> None:
        for name, mean in self._means.items():
            mean.copy_(self._named[name].detach())

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside the block the model has the running means of its weights, where they are kept, and the whole of them
        on every rank; between steps. Collective."""
        self._exchange_weights()
        try:
            with contextlib.nullcontext() if self.sharded is None else self.sharded.whole():
                yield
        finally:
            self._exchange_weights()

    def _exchange_weights(self) -> None:
        for name, mean in self._means.items():
            weight = self._named[name]
            if self._is_slice(name):  # its memory is where the layer looks for it
                before = weight.detach().clone()
                weight.data.copy_(mean)
                mean.copy_(before)
            else:
                weight.data, self._means[name] = mean, weight.data

    @property
    def held(self) -> Mapping[str, nn.Parameter]:
        """What this rank updates: weights, or its slices of them."""
        return self._named

    def _is_slice(self, name: str) -> bool:
        return self.sharded is not None and name in self.sharded.held

    def early_sums(self, submit: Callable[[Sum], None]) -> contextlib.AbstractContextManager[None]:
        """Around the last micro-batch of a step: what can be summed before its backward pass ends."""
        return self._sync.early_sums(submit) if self._sync.begins_early else contextlib.nullcontext()

    def reduce(self, loss: torch.Tensor, wants_stop: bool) -> torch.Tensor:
        """Sum gradients over ranks in place, and (loss, wish to stop, watch of each table). Collective."""
        # A fill and not a copy: the host would wait for the device to take a number from pageable memory.
        wish = torch.full((), float(wants_stop), device=self._device, dtype=torch.float64)
        figures = [loss.double(), wish]
        if self.sharded is not None:
            self.sharded.take_gradients()
            figures.append(self.sharded.square_of_gradients())
        self._check_learning()
        sums = torch.stack(figures)
        if self._row_watch is not None:
            sums = torch.cat([sums, self._row_watch.seen()])
        for parameter in self._named.values():
            if (
                parameter.requires_grad and parameter.grad is None
            ):  # no sample reached it here; one rank must do as many do
                parameter.grad = torch.zeros_like(parameter)
        self._sync.reduce(sums)
        return sums

    def _learning_now(self) -> set[str]:
        return {name for name, weight in self._named.items() if weight.requires_grad}

    def _check_learning(self) -> None:
        """Gradients are summed over ranks for the weights that learnt at first: others would differ between ranks."""
        if changed := sorted(self._learning ^ self._learning_now()):
            raise UserError(
                "requires_grad has changed since training began",
                option="weight of the model",
                value=changed[0],
                remedy="freeze or thaw weights first, then build a new TrainingPipeline (nestrec.PipelineCheckpoints "
                "takes the state over), or set its learning rate to 0",
            )

    def apply(self, sums: torch.Tensor, learning_rate: float) -> StepTotals:
        """Update once with what `reduce` has summed, and clear the gradients."""
        gradients = [p.grad for p in self._named.values() if p.grad is not None]
        used_here(gradients)  # the lane of collectives has made them
        norm, figures = self._norm(sums)
        if self._clip_norm is not None and gradients:
            # On the device: the host does not ask for the norm. Shorter gradients are multiplied by one, to the bit.
            foreach_mul_(gradients, (self._clip_norm / norm).clamp(max=1.0).to(gradients[0].dtype))
        self._optimizer.step(learning_rate)
        self._optimizer.clear_gradients()
        if self._mean_part is not None:
            with torch.no_grad():
                foreach_lerp_(list(self._means.values()), list(self._named.values()), 1.0 - self._mean_part)
        return StepTotals(loss=sums[0], gradient_norm=norm, wants_stop=sums[1], rows=sums[figures:])

    def _norm(self, sums: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Of all gradients, and how many of the sums stand before those of rows."""
        mine = [p.grad for name, p in self._named.items() if p.grad is not None and not self._is_slice(name)]
        norm = nn.utils.get_total_norm(mine)
        return (norm, 2) if self.sharded is None else ((norm.double().square() + sums[2]).sqrt().to(norm.dtype), 3)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights and optimiser state by name, whole. Collective where layers are sharded."""
        found = {f"model/{name}": self._whole(name, p.detach()) for name, p in self._named.items()}
        for name, state in self._optimizer.state.items():
            found |= {f"{_STATE}{name}/{part}": self._whole(name, value) for part, value in state.items()}
        return found | {f"{_MEAN}{name}": self._whole(name, mean) for name, mean in self._means.items()}

    def _whole(self, name: str, held: torch.Tensor) -> torch.Tensor:
        """held: a weight or something in its shape; a number of steps is the same everywhere."""
        if self.sharded is None or name not in self.sharded.held or held.dim() == 0:
            return held
        return self.sharded.gathered(name, held)

    def _mine(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        if self.sharded is None or name not in self.sharded.held or whole.dim() == 0:
            return whole
        return self.sharded.slice_of(whole)

    def buffers(self) -> dict[str, torch.Tensor]:
        """What the model keeps beside its weights and saves with them, such as the running means of BatchNorm: those of
        this rank."""
        owner_and_name = ((name, *name.rpartition(".")[::2]) for name, _ in self._model.named_buffers())
        unsaved = {n for n, owner, own in owner_and_name if own in unsaved_buffers(self._model.get_submodule(owner))}
        return {name: buffer for name, buffer in self._model.named_buffers() if name not in unsaved}

    def settings(self) -> dict[str, Any]:
        """What the optimiser keeps beside tensors, as JSON has it."""
        if isinstance(self._optimizer, AdamW):
            return {"kind": type(self._optimizer).__name__}
        return self._optimizer.settings()

    def load_settings(self, settings: Mapping[str, Any]) -> None:
        """Take back what `settings` gave, after `load`."""
        if not isinstance(self._optimizer, AdamW):
            self._optimizer.load_settings(settings)

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take back what `tensors` gave."""
        shapes = {name: list(parameter.shape) for name, parameter in self._named.items()}
        _check_same_model(shapes if self.sharded is None else shapes | self.sharded.shapes(), tensors)
        with torch.no_grad():
            for name, parameter in self._named.items():
                parameter.copy_(self._mine(name, tensors[f"model/{name}"]))
        saved: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith(_STATE):
                weight, _, part = name.removeprefix(_STATE).rpartition("/")
                saved.setdefault(weight, {})[part] = self._mine(weight, tensor)
        self._optimizer.load(saved)
        self._begin_means()  # where a run begins to keep them
        for name, mean in self._means.items():
            if (kept := tensors.get(f"{_MEAN}{name}")) is not None:
                mean.copy_(self._mine(name, kept))


def _check_same_model(wanted: Mapping[str, list[int]], tensors: Mapping[str, torch.Tensor]) -> None:
    saved = {name.removeprefix("model/"): list(tensors[name].shape) for name in tensors if name.startswith("model/")}
    for name in sorted(saved.keys() | wanted.keys()):
        if saved.get(name) != wanted.get(name):
            raise UserError(
                f"the checkpoint is of another model: it has {saved.get(name)}",
                option=f"shape of {name}",
                value=wanted.get(name),
                remedy="train into another folder (--output), or with its config.json",
            )
