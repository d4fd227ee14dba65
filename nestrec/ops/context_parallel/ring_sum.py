"""Ring attention sums (context parallelism): each rank has one part of the tokens, and keys circulate in a ring.

    out[i] = sum_{j visible to i} f(query i, key j)                   i of this part, j of any

At step s rank r has the keys of part r - s: it adds the terms of its queries with these keys and sends the keys to rank
r + 1. In the backward pass the gradients of keys circulate with them and return to their owner after n steps. So a rank
never stores more than its own part and one visiting part, and the order of all sums is defined:

    out and gradients of queries and parameters on rank r     parts r, r - 1, ..., r - n + 1
    gradients of the keys of part p                           ranks p, p + 1, ..., p + n - 1

within a pair of parts in the order of `token_partition.blocks_of`. Gradients of parameters cover the queries of this
rank; they must be all-reduced (summed) like all dense gradients. `ring_sum_reference` is the reference implementation
in one process. No values per pair are saved for backward; it recomputes them.

Legend: T tokens of a part, G sequences of a block, N queries, M keys.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from nestrec.ops.attention.mask_and_bias import AttentionMask
from nestrec.ops.context_parallel.token_partition import Block, BlockSide, TokenPartition, blocks_of

Tokens = Mapping[str, torch.Tensor]
"""Named tensors with one entry per token: (T, ...) for a part, (G, N, ...) in a block."""


class RingCommunicator(Protocol):
    """Communication of a context-parallel group whose ranks form a ring."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def shift(self, tokens: Tokens, num_tokens: int) -> dict[str, torch.Tensor]:
        """Send tensors to the next rank and return those of the previous rank, with `num_tokens` tokens. Collective."""


@dataclass(frozen=True, slots=True)
class ContextParallelGroup:
    """Partition of a batch over the ranks of a context-parallel group, with their communicator."""

    parts: TokenPartition
    """Assignment of tokens to ranks."""
    ring: RingCommunicator
    """Communicator of the group."""

    @property
    def part(self) -> int:
        """Index of the part of this rank, from 0."""
        return self.ring.rank


class PairFunction(Protocol):
    """Attention function f of a block: for each query, a sum over the keys of the block."""

    @property
    def rules(self) -> AttentionMask:
        """Attention mask; must be causal and without candidates."""

    @property
    def fixed(self) -> frozenset[str]:
        """Names of the token tensors without a gradient, such as times."""

    def width(self, queries: Tokens, keys: Tokens) -> Sequence[int]:
        """Return the shape of the result per query."""

    def __call__(self, queries: Tokens, keys: Tokens, block: Block, parameters: Tokens) -> torch.Tensor:
        """Return the (G, N, *width) sums over the keys of the block."""


def pair_sum(  # noqa: PLR0917
    function: PairFunction,
    parts: TokenPartition,
    pair: tuple[int, int],
    queries: Tokens,
    keys: Tokens,
    parameters: Tokens,
) -> torch.Tensor:
    """Return the (T, *width) sums of the queries of part `pair[0]` over the keys of part `pair[1]`."""
    first = next(iter(queries.values()))
    width = function.width(queries, keys)
    total = first.new_zeros((len(first), *width), dtype=torch.promote_types(first.dtype, torch.float32))
    for block in blocks_of(parts, *pair, function.rules, first.device):
        block_sum = function(_take(block.queries, queries), _take(block.keys, keys), block, parameters)
        block.queries.add(total, block_sum)
    return total


class PairGradients(NamedTuple):
    """Gradients of the inputs of `pair_sum` by name; inputs without a gradient are omitted."""

    queries: dict[str, torch.Tensor]
    """Gradients of the query tensors."""
    keys: dict[str, torch.Tensor]
    """Gradients of the key tensors."""
    parameters: dict[str, torch.Tensor]
    """Gradients of the parameters."""


def pair_gradients(  # noqa: PLR0917
    function: PairFunction,
    parts: TokenPartition,
    pair: tuple[int, int],
    queries: Tokens,
    keys: Tokens,
    parameters: Tokens,
    grad: torch.Tensor,
) -> PairGradients:
    """Return the gradients of the inputs of `pair_sum`; grad: gradient of its result."""
    total = PairGradients(*(_zeros(tensors, function.fixed) for tensors in (queries, keys, parameters)))
    for block in blocks_of(parts, *pair, function.rules, grad.device):
        with torch.enable_grad():
            block_queries = _leaves(_take(block.queries, queries), function.fixed)
            block_keys = _leaves(_take(block.keys, keys), function.fixed)
            weights = _leaves(parameters, ())
            block_sum = function(block_queries, block_keys, block, weights)
        inputs = [x for tensors in (block_queries, block_keys, weights) for x in tensors.values() if x.requires_grad]
        # Padding gets the gradient of a real token, which is harmless: padding queries attend to no key.
        gradients = iter(torch.autograd.grad(block_sum, inputs, block.queries.take(grad).to(block_sum.dtype)))
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
    """Reference implementation of `ring_sum`: computes all parts in one process.

    Args:
        function: Attention function.
        parts: Partition of the tokens.
        queries: Query tensors of each part.
        keys: Key tensors of each part.
        parameters: Parameters of the function.
        grads: Gradient of the result of each part; None skips the backward pass.

    Returns:
        Results of each part, and the gradients of each part.
    """
    num = parts.size
    arguments = lambda r, p: (function, parts, (r, p), queries[r], keys[p], parameters)  # noqa: E731
    sums = [_sum_in_order(pair_sum(*arguments(r, (r - s) % num)) for s in range(num)) for r in range(num)]
    if grads is None:
        return sums, []
    pairs = {(r, p): pair_gradients(*arguments(r, p), grads[r]) for r in range(num) for p in range(num)}
    gradients = [
        PairGradients(
            queries=_sum_by_name(pairs[i, (i - s) % num].queries for s in range(num)),
            keys=_sum_by_name(pairs[(i + s) % num, i].keys for s in range(num)),
            parameters=_sum_by_name(pairs[i, (i - s) % num].parameters for s in range(num)),
        )
        for i in range(num)
    ]
    return sums, gradients


def ring_sum(
    function: PairFunction, context: ContextParallelGroup, queries: Tokens, keys: Tokens, parameters: Tokens
) -> torch.Tensor:
    """Return the (T, *width) sums of this part's queries over the keys of all parts.

    Collective: all ranks of the group must call it, and its backward pass, in the same order.

    Args:
        function: Attention function.
        context: Partition of the tokens and communicator.
        queries: Query tensors of this part.
        keys: Key tensors of this part.
        parameters: Parameters of the function.
    """
    names = tuple(tuple(given) for given in (queries, keys, parameters))
    job = _Job(function, context, names)
    device = next(iter(queries.values())).device
    with torch.autocast(device.type, enabled=False):  # backward computes in the dtypes of the inputs too
        return _RingSum.apply(job, *queries.values(), *keys.values(), *parameters.values())  # type: ignore[no-any-return]


def ring_walk(context: ContextParallelGroup, keys: Tokens) -> Iterator[tuple[int, Tokens]]:
    """Yield each part and its keys as they circulate in the ring, starting with the own part. Collective."""
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

    def unpack(self, tensors: Sequence[torch.Tensor]) -> tuple[Tokens, Tokens, Tokens]:
        remaining = iter(tensors)
        queries, keys, parameters = ({name: next(remaining) for name in names} for names in self.names)
        return queries, keys, parameters


class _RingSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: _Job, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.job = job
        ctx.save_for_backward(*tensors)
        queries, keys, parameters = job.unpack(tensors)
        function = job.function
        parts = job.context.parts
        part = job.context.part
        sums = _sum_in_order(
            pair_sum(function, parts, (part, other), queries, held, parameters)
            for other, held in ring_walk(job.context, keys)
        )
        return sums.to(tensors[0].dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        job: _Job = ctx.job
        queries, keys, parameters = job.unpack(ctx.saved_tensors)
        function = job.function
        context = job.context
        num = context.ring.size
        part = context.part
        traveling = keys
        own = dict[str, torch.Tensor]()
        for step in range(num):
            held = {name: traveling[name] for name in keys}
            pair = context.part, part
            partial = pair_gradients(function, context.parts, pair, queries, held, parameters, grads[0])
            for name, x in (partial.queries | partial.parameters).items():
                own[name] = x if step == 0 else own[name] + x
            sums = {_GRAD + name: x if step == 0 else traveling[_GRAD + name] + x for name, x in partial.keys.items()}
            part = (part - 1) % num
            outgoing = sums if step + 1 == num else {**held, **sums}
            traveling = context.ring.shift(outgoing, context.parts.num_tokens(part))
        gradients = own | {name.removeprefix(_GRAD): x for name, x in traveling.items()}
        inputs = {**queries, **keys, **parameters}
        return None, *(gradients[name].to(x.dtype) if name in gradients else None for name, x in inputs.items())


_GRAD = "grad of "


def _take(side: BlockSide, tokens: Tokens) -> dict[str, torch.Tensor]:
    return {name: side.take(x) for name, x in tokens.items()}


def _leaves(tokens: Tokens, fixed: Iterable[str]) -> dict[str, torch.Tensor]:
    return {name: x.detach().requires_grad_(name not in fixed) for name, x in tokens.items()}


def _zeros(tokens: Tokens, fixed: frozenset[str]) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros_like(
            x, dtype=torch.promote_types(x.dtype, torch.float32), memory_format=torch.contiguous_format
        )
        for name, x in tokens.items()
        if name not in fixed
    }


def _sum_in_order(values: Iterable[torch.Tensor]) -> torch.Tensor:
    """Add the values sequentially, in order."""
    remaining = iter(values)
    total = next(remaining)
    for other in remaining:
        total = total + other
    return total


def _sum_by_name(values: Iterable[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    remaining = iter(values)
    total = next(remaining)
    for other in remaining:
        total = {name: x + other[name] for name, x in total.items()}
    return total
