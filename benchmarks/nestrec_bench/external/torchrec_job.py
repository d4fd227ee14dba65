"""Training job of TorchRec through its public interface: row-wise sharded tables, fused RowWiseAdagrad.

TorchRec is imported only inside functions, because it is optional. `make torchrec` creates an environment with it.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nestrec_bench.external.external_workload import BAG, SEQUENCE, TABLE_OF, PeersBatch, PeersWorkload
from nestrec_bench.external.training_job import DENSE_LEARNING_RATE, ROW_EPS, ROW_LEARNING_RATE, DenseKind, DensePart

TORCHREC_MODES = ("plain", "sparse_dist", "sparse_dist_lite")
_MEMORY_BYTES = 8 << 30


class TorchRecJob:
    """Training job of TorchRec on one rank, with a plain loop or one of its training pipelines."""

    system = "torchrec"

    def __init__(self, workload: PeersWorkload, batches: Sequence[PeersBatch], dense: DenseKind, mode: str) -> None:
        from torchrec import __version__

        self.mode = mode
        self.version = __version__
        self.losses: list[torch.Tensor] = []
        model = _PeersModel(workload, dense)
        # The loss is recorded by a hook and not in `forward`, because pipelines trace `forward` symbolically.
        model.dense.register_forward_hook(lambda module, inputs, loss: self.losses.append(loss.detach()))
        self._batches = _endless(batches)
        self._progress = make_progress(mode, *_shard(model, workload))

    def step(self) -> None:
        """Run one training step. Collective."""
        self._progress(self._batches)


@dataclass(frozen=True, slots=True)
class _KeyedBatch:
    """Batch with the interface `Pipelineable` of TorchRec's training pipelines."""

    keyed: Any
    lengths: torch.Tensor
    dense: torch.Tensor
    label: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> "_KeyedBatch":
        parts = (self.keyed, self.lengths, self.dense, self.label)
        return _KeyedBatch(*(part.to(device=device, non_blocking=non_blocking) for part in parts))

    def record_stream(self, stream: Any) -> None:
        """Do nothing: a CPU does not have streams."""


class _PeersModel(nn.Module):
    """Model of two embedding collections and the dense part."""

    def __init__(self, workload: PeersWorkload, dense: DenseKind) -> None:
        from torchrec import (
            EmbeddingBagCollection,
            EmbeddingBagConfig,
            EmbeddingCollection,
            EmbeddingConfig,
            PoolingType,
        )

        super().__init__()
        meta = torch.device("meta")
        size = {"embedding_dim": workload.cfg.dim, "num_embeddings": workload.cfg.num_rows}
        sequence = EmbeddingConfig(name=TABLE_OF[SEQUENCE], feature_names=[SEQUENCE], **size)
        bag = EmbeddingBagConfig(name=TABLE_OF[BAG], feature_names=[BAG], pooling=PoolingType.SUM, **size)
        self.sequences = EmbeddingCollection(device=meta, tables=[sequence])
        self.bags = EmbeddingBagCollection(device=meta, tables=[bag])
        self.dense = DensePart(workload.cfg, dense)

    def forward(self, batch: _KeyedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = self.sequences(batch.keyed)[SEQUENCE].values()
        bags = self.bags(batch.keyed).values()
        loss = self.dense(tokens, batch.lengths, bags, batch.dense, batch.label)
        return loss, loss.detach()


def _endless(batches: Sequence[PeersBatch]) -> Iterator[_KeyedBatch]:
    from torchrec import KeyedJaggedTensor
    from torchrec.streamable import Pipelineable

    Pipelineable.register(_KeyedBatch)
    joined = [(torch.cat(list(b.keys.values())), torch.cat(list(b.lengths.values()))) for b in batches]
    for batch, (keys, lengths) in itertools.cycle(zip(batches, joined, strict=True)):
        # A new instance per step, because KeyedJaggedTensor caches derived values.
        keyed = KeyedJaggedTensor(keys=list(batch.keys), values=keys, lengths=lengths)
        yield _KeyedBatch(keyed, batch.lengths[SEQUENCE], batch.dense, batch.label)


def _shard(model: _PeersModel, workload: PeersWorkload) -> tuple[nn.Module, Any]:
    """Return the sharded model with the initial rows of the workload, and the optimizer of its dense part."""
    collections = [model.sequences, model.bags]
    sharded, optimizer = shard_by_rows(model, collections, make_sharders(), list(TABLE_OF.values()), workload.cfg.batch)
    _load_first_rows(sharded, workload)
    return sharded, optimizer


def shard_by_rows(
    model: nn.Module, collections: Sequence[nn.Module], sharders: list[Any], tables: Sequence[str], batch: int
) -> tuple[nn.Module, Any]:
    """Shard the tables of a model by rows over all ranks.

    Args:
        model: Model with embedding collections.
        collections: Its embedding collections.
        sharders: Sharders of the collections (see `make_sharders`).
        tables: Names of the tables.
        batch: Number of samples per rank.

    Returns:
        The sharded model, whose backward pass applies RowWiseAdagrad, and the Adam optimizer of its dense part.
    """
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.types import ShardingEnv
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.optim.keyed import KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    rows = [parameter for collection in collections for parameter in collection.parameters()]
    apply_optimizer_in_backward(RowWiseAdagrad, rows, {"lr": ROW_LEARNING_RATE, "eps": ROW_EPS})
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    plan = _row_wise_plan(model, sharders, tables, batch)
    sharded = DistributedModelParallel(model, env=env, device=torch.device("cpu"), plan=plan, sharders=sharders)
    dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    return sharded, KeyedOptimizerWrapper(dense, lambda params: torch.optim.Adam(params, lr=DENSE_LEARNING_RATE))


def make_sharders() -> list[Any]:
    """Return the sharders of sequence and bag collections, for row-wise sharding on CPUs."""
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    bags = EmbeddingBagCollectionSharder()
    # TorchRec offers row-wise sharding of bags only on GPUs, although the implementation also runs on CPUs.
    bags.sharding_types = lambda compute_device_type: ["row_wise"]
    return [EmbeddingCollectionSharder(), bags]


def _row_wise_plan(model: nn.Module, sharders: list[Any], tables: Sequence[str], batch: int) -> Any:
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology

    world = dist.get_world_size()
    topology = Topology(
        world_size=world, local_world_size=world, compute_device="cpu", ddr_cap=_MEMORY_BYTES, hbm_cap=_MEMORY_BYTES
    )
    by_rows = ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"])
    constraints = dict.fromkeys(tables, by_rows)
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints, batch_size=batch)
    return planner.plan(model, sharders)


def _load_first_rows(sharded: nn.Module, workload: PeersWorkload) -> None:
    state = sharded.state_dict()
    for number, table in enumerate(TABLE_OF.values()):
        weight = next(value for name, value in state.items() if name.endswith(f"{table}.weight"))
        for shard in weight.local_shards():
            low = shard.metadata.shard_offsets[0]
            shard.tensor.copy_(workload.first_rows(number, low, low + len(shard.tensor)))


def make_progress(mode: str, model: nn.Module, optimizer: Any) -> Callable[[Iterator[Any]], object]:
    """Return a function that runs one step of the plain loop, or of one of TorchRec's training pipelines."""
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
    from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSparseDistLite

    def plain(batches: Iterator[Any]) -> None:
        optimizer.zero_grad()
        loss, _ = model(next(batches))
        loss.backward()
        optimizer.step()

    if mode == "plain":
        return plain
    kind = {"sparse_dist": TrainPipelineSparseDist, "sparse_dist_lite": TrainPipelineSparseDistLite}[mode]
    progress: Callable[[Iterator[Any]], object] = kind(model, optimizer, torch.device("cpu")).progress
    return progress
