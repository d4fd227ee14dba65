"""The run configuration: one section per component, defined next to its code, and the general training options."""

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
    """Options for publishing model versions while a run trains."""

    address: str = ""
    """Folder or fsspec URL where model versions are published for `nestrec serve --follow`; empty disables
    publishing."""
    every_steps: Count | None = None
    """Number of steps between published versions; a version is also published when the run ends or is stopped."""
    every_s: Positive | None = None
    """Approximate time between published versions, in seconds; after each version the ranks agree on the step of the
    next one."""
    full_every_versions: Count = 50
    """Number of versions between full versions, which servers load when they start or have missed a delta."""
    max_versions: Count = 100
    """Maximum number of versions that are retained, in addition to their base versions; servers can be pinned to any
    of them."""


@config
class DataConfig:
    """Dataset of a run."""

    folder: str = ""
    """Folder of the prepared dataset (see `nestrec prepare --help`)."""
    synthetic: str | None = None
    """Preset of a synthetic dataset that is generated if the folder is missing."""
    prepare_command: str = ""
    """Command that prepares the folder from the public files, shown in the error message if the folder is missing."""


@config
class TrainingConfig:
    """General options of training: duration, precision, checkpoints and validation."""

    epochs: Count = 10
    """Number of passes over the training samples."""
    max_steps: Count | None = None
    """Maximum number of training steps; overrides `epochs` if it is reached first."""
    seed: Seed = 42
    """Random seed of initial weights, sample order, dropout and negatives."""
    device: DeviceChoice = "auto"
    """Device to train on; `auto` uses a GPU if one is available."""
    precision: Literal["fp32", "tf32", "bf16", "fp8"] = "tf32"
    """Precision of dense matrix products on a GPU (mixed precision): bf16 is fast and uses the least memory, fp32 is
    the most accurate, fp8 is bf16 with 8-bit projections for hstu and fuxi on Hopper. A CPU always uses fp32."""
    weight_dtype: Literal["float32", "float64"] = "float32"
    """Data type of the dense weights; float64 is meant for equality tests."""
    checkpoint_every_steps: Count | None = None
    """Number of steps between checkpoints; a checkpoint is also saved at each evaluation, at the end, and when the run
    is stopped."""
    checkpoint_async: bool = False
    """Whether checkpoints are written asynchronously, in blocks of rows; rows that training changes during the save
    are copied to a buffer first (copy-on-write)."""
    checkpoint_buffer_mib: Natural = 256
    """Host memory per rank for the copy-on-write buffer of asynchronous checkpoints, in MiB. When it is half full,
    buffered rows are written first; training waits only if it is full."""
    checkpoint_mirror: str = ""
    """Folder or fsspec URL (for example s3://bucket/run) to which checkpoints are mirrored; they are downloaded from it
    if the run folder has no checkpoints. Empty disables mirroring."""
    incremental_checkpoints: Natural = 0
    """Number of incremental checkpoints between full ones; an incremental checkpoint contains only the rows used since
    the previous one. 0 makes all checkpoints full."""
    max_checkpoints: Count = 3
    """Maximum number of checkpoints that are retained; older ones are deleted, except the best one."""
    eval_every_epochs: Natural = 1
    """Number of epochs between evaluations on the validation split; 0 disables validation."""
    early_stopping_patience: Count | None = None
    """Number of evaluations without improvement after which training stops (early stopping); None disables it."""
    train_only: bool = False
    """Whether to train without validation and without the final test; `nestrec eval` can evaluate the run later."""
    num_threads: Count | None = None
    """Number of CPU threads per rank for PyTorch and loops over rows; None uses OMP_NUM_THREADS or PyTorch's
    default."""


@config
class RunConfig:
    """Complete configuration of a run. `nestrec train` resolves a recipe to it and writes it to RUN/config.json.

    `nestrec options train RECIPE` lists the fields by their dotted names, which are also the names of the options.
    """

    name: str
    """Name of the recipe, shown in reports."""
    task: TaskConfig
    """Task (learning objective) and model."""
    tables: Mapping[str, TableOverrides] = field(default_factory=dict)
    """Options of the embedding tables by table name, or `*` for all tables: --tables.items.dim 128
    --tables.*.dtype bfloat16 (docs/tables.md)."""
    data: DataConfig = DataConfig()
    """Dataset."""
    batch: BatchConfig = BatchConfig()
    """Batch size, order and loading of samples."""
    windows: WindowsConfig = WindowsConfig()
    """Time windows; only for batch.order=chronological."""
    balance: BalanceConfig = BalanceConfig()
    """Sample balancing: assignment of a step's samples to ranks."""
    parallel: ParallelConfig = ParallelConfig()
    """Parallelism: sharding of tables and dense layers over ranks."""
    replica_sync: ReplicaSyncConfig = ReplicaSyncConfig()
    """Synchronization of the replicas of rows; only if parallel.num_replicas > 1."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer and learning-rate schedule of the dense weights."""
    pipeline: PipelineConfig = PipelineConfig()
    """Pipeline schedule that overlaps lookup, communication and compute."""
    training: TrainingConfig = TrainingConfig()
    """Duration, device, precision, checkpoints and validation."""
    publish: PublishConfig = PublishConfig()
    """Publishing of model versions for servers that follow the run."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Reason for each option that `nestrec train auto` chose."""
