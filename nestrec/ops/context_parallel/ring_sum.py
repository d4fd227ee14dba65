"""Sums over keys that lie on several ranks: each rank holds a part of the tokens, and keys go round in a ring.

    out[i] = sum_{j seen by i} f(query i, key j)                      i of this part, j of any

At step s rank r has the keys of part r - s: it adds what its queries find there, and hands them on to rank r + 1. In
the backward pass the gradients of keys travel with them and come home after n steps. So a rank never holds more than
its own part and one that passes by, and the order of all sums is defined:

    out and gradients of queries and parameters on rank r     parts r, r - 1, ..., r - n + 1
    gradients of the keys of part p                           ranks p, p + 1, ..., p + n - 1

within a pair of parts in the order of `blocks.py`. Gradients of parameters are those of a rank's own queries; the
ranks' sums are to be added as all dense gradients are. `ring_sum_reference` is the definition, in one process. Nothing
of the pairs is kept for the backward pass: it computes them again.

Legend: T tokens of a part, G sequences of a block, N queries, M keys.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from nestrec.ops.attention.mask_and_bias import AttentionMask
from nestrec.ops.context_parallel.token_partition import Block, BlockSide, TokenPartition, blocks_of

Tokens = Mapping[str, torch.Tensor]
"""What tokens have, by name: (T, ...) each, in a block (G, N, ...)."""


class RingCommunicator(Protocol):
    """The ranks of a context group, one after the other and round again."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def shift(self, tokens: Tokens, num_tokens: int) -> dict[str, torch.Tensor]:
        """Hand these on to the next rank; what the one before hands on, of so many tokens. Collective."""


@dataclass(frozen=True, slots=True)
class ContextParallelGroup:
    """Sequences of which this rank holds a part, and who holds the others."""

    parts: TokenPartition
    ring: RingCommunicator

    @property
    def part(self) -> int:
        """Of this rank, from 0."""
        return self.ring.rank


class PairFunction(Protocol):
    """f of a block: a sum over its keys for each query."""

    @property
    def rules(self) -> AttentionMask:
        """Who sees whom; no candidates, and nobody looks ahead."""

    @property
    def fixed(self) -> frozenset[str]:
        """Names of what tokens have that has no gradient: their times."""

    def width(self, queries: Tokens, keys: Tokens) -> Sequence[int]:
        """Shape of what a query gets."""

    def __call__(self, queries: Tokens, keys: Tokens, block: Block, parameters: Tokens) -> torch.Tensor:
        """(G, N, *width)"""


def pair_sum(  # noqa: PLR0917
    function: PairFunction,
    parts: TokenPartition,
    pair: tuple[int, int],
    queries: Tokens,
    keys: Tokens,
    parameters: Tokens,
) -> torch.Tensor:
    """(T, *width) what the queries of part `pair[0]` find among the keys of part `pair[1]`."""
    some = next(iter(queries.values()))
    width = function.width(queries, keys)
    total = some.new_zeros((len(some), *width), dtype=torch.promote_types(some.dtype, torch.float32))
    for block in blocks_of(parts, *pair, function.rules, some.device):
        found = function(_taken(block.queries, queries), _taken(block.keys, keys), block, parameters)
        block.queries.add(total, found)
    return total


class PairGradients(NamedTuple):
    """By name; those that have none are left out."""

    queries: dict[str, torch.Tensor]
    keys: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]


def pair_gradients(  # noqa: PLR0917
    function: PairFunction,
    parts: TokenPartition,
    pair: tuple[int, int],
    queries: Tokens,
    keys: Tokens,
    parameters: Tokens,
    grad: torch.Tensor,
) -> PairGradients:
    """Gradients of what `pair_sum` was given, from that of its result."""
    total = PairGradients(*(_zeros(given, function.fixed) for given in (queries, keys, parameters)))
    for block in blocks_of(parts, *pair, function.rules, grad.device):
        with torch.enable_grad():
            own = _leaves(_taken(block.queries, queries), function.fixed)
            others = _leaves(_taken(block.keys, keys), function.fixed)
            weights = _leaves(parameters, ())
            found = function(own, others, block, weights)
        learnt = [x for given in (own, others, weights) for x in given.values() if x.requires_grad]
        # Padding has the gradient of some token: it sees nothing, so nothing comes of it.
        gradients = iter(torch.autograd.grad(found, learnt, block.queries.take(grad).to(found.dtype)))
        for side, sums in ((block.queries, total.queries), (block.keys, total.keys)):
            for name in sums:
                side.add(sums[name], next(gradients))
        for name in total.parameters:
            total.parameters[name] += next(gradients)
    return total


def ring_sum_reference(  # noqa: PLR0917
    function: PairFunction,
    parts: TokenPartition,
    queries: Sequence[Tokens],
    keys: Sequence[Tokens],
    parameters: Tokens,
    grads: Sequence[torch.Tensor] | None = None,
) -> tuple[list[torch.Tensor], list[PairGradients]]:
    """The definition: sums of every part, and from their gradients those of every part's tokens and parameters."""
    num = parts.size
    given = lambda r, p: (function, parts, (r, p), queries[r], keys[p], parameters)  # noqa: E731
    sums = [_added(pair_sum(*given(r, (r - s) % num)) for s in range(num)) for r in range(num)]
    if grads is None:
        return sums, []
    pairs = {(r, p): pair_gradients(*given(r, p), grads[r]) for r in range(num) for p in range(num)}
    gradients = [
        PairGradients(
            queries=_added_by_name(pairs[i, (i - s) % num].queries for s in range(num)),
            keys=_added_by_name(pairs[(i + s) % num, i].keys for s in range(num)),
            parameters=_added_by_name(pairs[i, (i - s) % num].parameters for s in range(num)),
        )
        for i in range(num)
    ]
    return sums, gradients


def ring_sum(
    function: PairFunction, context: ContextParallelGroup, queries: Tokens, keys: Tokens, parameters: Tokens
) -> torch.Tensor:
    """(T, *width) sums of this part's queries over the keys of all parts. Collective, and so is its backward pass."""
    names = tuple(tuple(given) for given in (queries, keys, parameters))
    job = _Job(function, context, names)
    device = next(iter(queries.values())).device
    with torch.autocast(device.type, enabled=False):  # the backward pass computes in the types that are given, too
        return _RingSum.apply(job, *queries.values(), *keys.values(), *parameters.values())  # type: ignore[no-any-return]


def ring_walk(context: ContextParallelGroup, keys: Tokens) -> Iterator[tuple[int, Tokens]]:
    """Each part and its keys, the own ones first, as they pass by. Collective."""
    held = keys
    num = context.ring.size
    for step in range(num):
        part = (context.part - step) % num
        yield part, held
        if step + 1 < num:
            held = context.ring.shift(held, context.parts.num_tokens((part - 1) % num))


@dataclass(frozen=True, slots=True)
class _Job:
    function: PairFunction
    context: ContextParallelGroup
    names: tuple[tuple[str, ...], ...]

    def unpacked(self, tensors: Sequence[torch.Tensor]) -> tuple[Tokens, Tokens, Tokens]:
        left = iter(tensors)
        queries, keys, parameters = ({name: next(left) for name in names} for names in self.names)
        return queries, keys, parameters


class _RingSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: _Job, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.job = job
        ctx.save_for_backward(*tensors)
        queries, keys, parameters = job.unpacked(tensors)
        function = job.function
        parts = job.context.parts
        part = job.context.part
        sums = _added(
            pair_sum(function, parts, (part, other), queries, held, parameters)
            for other, held in ring_walk(job.context, keys)
        )
        return sums.to(tensors[0].dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        job: _Job = ctx.job
        queries, keys, parameters = job.unpacked(ctx.saved_tensors)
        function = job.function
        context = job.context
        num = context.ring.size
        part = context.part
        travelling = keys
        own = dict[str, torch.Tensor]()
        for step in range(num):
            held = {name: travelling[name] for name in keys}
            pair = context.part, part
            found = pair_gradients(function, context.parts, pair, queries, held, parameters, grads[0])
            for name, x in (found.queries | found.parameters).items():
                own[name] = x if step == 0 else own[name] + x
            sums = {_GRAD + name: x if step == 0 else travelling[_GRAD + name] + x for name, x in found.keys.items()}
            part = (part - 1) % num
            going = sums if step + 1 == num else {**held, **sums}
            travelling = context.ring.shift(going, context.parts.num_tokens(part))
        found_by_name = own | {name.removeprefix(_GRAD): x for name, x in travelling.items()}
        given = {**queries, **keys, **parameters}
        return None, *(found_by_name[name].to(x.dtype) if name in found_by_name else None for name, x in given.items())


_GRAD = "grad of "


def _taken(side: BlockSide, tokens: Tokens) -> dict[str, torch.Tensor]:
    return {name: side.take(x) for name, x in tokens.items()}


def _leaves(given: Tokens, fixed: Iterable[str]) -> dict[str, torch.Tensor]:
    return {name: x.detach().requires_grad_(name not in fixed) for name, x in given.items()}


def _zeros(given: Tokens, fixed: frozenset[str]) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros_like(
            x, dtype=torch.promote_types(x.dtype, torch.float32), memory_format=torch.contiguous_format
        )
        for name, x in given.items()
        if name not in fixed
    }


def _added(found: Iterable[torch.Tensor]) -> torch.Tensor:
    """In their order, one at a time."""
    left = iter(found)
    total = next(left)
    for other in left:
        total = total + other
    return total


def _added_by_name(found: Iterable[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    left = iter(found)
    total = next(left)
    for other in left:
        total = {name: x + other[name] for name, x in total.items()}
    return total
