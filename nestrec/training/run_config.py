"""The configuration of a run: named parts, each beside the code it configures, and what is general to training."""

from collections.abc import Mapping
from dataclasses import field
from typing import Literal

from nestrec.balance import BalanceConfig
from nestrec.base.config import config
from nestrec.base.config_values import Count, Natural, Positive, Seed
from nestrec.base.cuda import DeviceChoice
from nestrec.data.batch_loader import BatchConfig
from nestrec.data.samples.time_windows import WindowsConfig
from nestrec.distributed.topology import ParallelConfig
from nestrec.embedding.routing.replica_key_union import ReplicaSyncConfig
from nestrec.pipeline.dense.dense_optimizer import OptimizerConfig
from nestrec.pipeline.schedule_spec import PipelineConfig
from nestrec.tasks.table_overrides import TableOverrides
from nestrec.tasks.task_registry import TaskConfig


@config
class PublishConfig:
    address: str = ""
    """folder, or address that fsspec knows, where versions appear for `nestrec serve --follow`; none: nowhere"""
    every_steps: Count | None = None
    """publish so often; a run that publishes also does so at its end and when it is told to stop"""
    every_s: Positive | None = None
    """publish about so often, in seconds: after each version ranks agree on the step of the next"""
    snapshot_every: Count = 50
    """every so many versions one is also told in full, for servers that begin or have missed one"""
    keep: Count = 100
    """newest versions that stay, and what they build on; a server can be pinned to any of them"""


@config
class DataConfig:
    folder: str = ""
    """prepared dataset (see `nestrec prepare --help`)"""
    synthetic: str | None = None
    """preset that is generated into the folder where it is missing"""
    prepare: str = ""
    """the command that makes the folder out of the public files, for the error message where it is missing"""


@config
class TrainingConfig:
    epochs: Count = 10
    """passes over the training samples"""
    max_steps: Count | None = None
    """stop after so many steps, whatever the epochs"""
    seed: Seed = 42
    """of initial weights, sample order, dropout and negatives"""
    device: DeviceChoice = "auto"
    """auto takes a GPU where there is one"""
    precision: Literal["fp32", "tf32", "bf16", "fp8"] = "tf32"
    """of dense products on a GPU: bf16 is quick and takes least memory, fp32 most exact; fp8 is bf16 with projections
    of eight bits, for hstu and fuxi on Hopper; a CPU computes in fp32"""
    dtype: Literal["float32", "float64"] = "float32"
    """of dense weights; float64 is for tests of equality"""
    checkpoint_every_steps: Count | None = None
    """save so often; a run also saves at its end, at each evaluation and when it is told to stop"""
    checkpoint_async: bool = False
    """write checkpoints in the background, a piece of the rows at a time; rows that change meanwhile are put aside"""
    checkpoint_aside_mib: Natural = 256
    """host memory of a rank for rows that change before they are written; when half of it is taken these are written
    first, and training waits only where it is full all the same"""
    checkpoint_address: str = ""
    """a second place for checkpoints, a folder or any address of fsspec (s3://bucket/run): copied there as they are
    saved, and taken from there where the run's folder has none"""
    incremental_saves: Natural = 0
    """after a full checkpoint, so many in a row hold only the rows used since the one before; 0 makes all full"""
    keep_checkpoints: Count = 3
    """newest checkpoints that stay; older ones are deleted, the best epoch's never"""
    evaluate_every_epochs: Natural = 1
    """measure on the validation part so often; 0 never"""
    patience: Count | None = None
    """stop after so many evaluations without a better validation metric"""
    train_only: bool = False
    """train without measuring: no validation, and no test at the end (nestrec eval measures the run later)"""
    num_threads: Count | None = None
    """threads that torch and the loops over rows use on the CPU, on each rank; none: as many as the environment
    (OMP_NUM_THREADS) or torch sets"""


@config
class RunConfig:
    """All that a run is made of; `nestrec train` resolves a recipe to one, and writes it to config.json of the run.

    `nestrec options train RECIPE` lists the fields by their dotted names, which are those of overrides.
    """

    name: str
    """name of the recipe, for reports"""
    task: TaskConfig
    """what is learned, and the model"""
    tables: Mapping[str, TableOverrides] = field(default_factory=dict)
    """of the task, each by its name, or all by *: --tables.items.dim 128 --tables.*.dtype bfloat16 (docs/tables.md)"""
    data: DataConfig = DataConfig()
    """where the samples come from"""
    batch: BatchConfig = BatchConfig()
    """how samples form steps"""
    windows: WindowsConfig = WindowsConfig()
    """windows of time, where batch.order is chronological"""
    balance: BalanceConfig = BalanceConfig()
    """which rank computes which samples of a step"""
    ranks: ParallelConfig = ParallelConfig()
    """how ranks share the rows of the tables"""
    replica_sync: ReplicaSyncConfig = ReplicaSyncConfig()
    """how copies of a row are kept alike, where ranks.replicas > 1"""
    optimizer: OptimizerConfig = OptimizerConfig()
    """how weights follow gradients"""
    pipeline: PipelineConfig = PipelineConfig()
    """how lookup, communication and compute share the time of a step"""
    training: TrainingConfig = TrainingConfig()
    """how long, where, how often"""
    publish: PublishConfig = PublishConfig()
    """versions of the model for servers that follow the run"""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """option to why it was chosen, where `train auto` did"""
