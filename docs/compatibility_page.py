"""Generates the compatibility tables from the registries of plugins, their specs, and the checks of the configuration.

A cell is either a field of a spec, or the result of the check that training or export runs with these options.
"""

import typing
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from markdown_text import code, page, table

from nestrec.base.config_values import PluginConfig
from nestrec.base.errors import UserError
from nestrec.distributed.topology import ParallelConfig
from nestrec.embedding.routing.replica_key_union import check_weight_averaging
from nestrec.embedding.row_optimizer import ROW_OPTIMIZERS
from nestrec.embedding.table_config import StoreConfig, TableConfig, check_placements, check_tables
from nestrec.models.backbone_registry import BACKBONES
from nestrec.pipeline.schedule_spec import SCHEDULES, PipelineConfig
from nestrec.serving.model.serving_spec import NoBackboneConfig, check_publishable, serving_spec_of
from nestrec.tasks.task import Task
from nestrec.tasks.task_registry import TASKS
from nestrec.training.run_config import RunConfig, TrainingConfig
from nestrec.training.validation import check_dense_sharding

_INTRO = (
    "This page is generated from the specs of the tasks, backbones, schedules, row stores and row optimizers, and from "
    "the checks that training and export run. Schedules, row stores and row optimizers do not depend on the task or on "
    "the backbone: a combination is supported unless a table or a note of this page excludes it. An unsupported "
    "combination is an error before training starts."
)


def compatibility_page() -> str:
    """Return the page."""
    return page(
        "# Compatibility",
        _INTRO,
        "## Tasks",
        _tasks(),
        "*Online training* is training in time windows (`batch.order=chronological`, `nestrec train-stream`). *Context "
        "parallelism* divides a sample among ranks (`parallel.context_parallel`).",
        "## Backbones",
        _backbones(),
        "*Semi-local attention* is the section `--task.encoder.attention`, which limits the attention span per layer. "
        "*Context parallelism* refers to the default options; truncation between layers (`attention.truncate_to`) "
        "excludes it. A backbone without a KV cache is served too, but computes the full history for each request.",
        "## Schedules",
        _schedules(),
        "An *exact* schedule gives results that are bitwise identical to those of `serial`, for the same micro-batches "
        "and window cache. *Needs micro-batches*: with a single micro-batch, the schedule behaves like another one. "
        "*Automatic micro-batches*: `batch.num_micro_batches=auto`. FSDP (`parallel.dense=fsdp`) also excludes context "
        "parallelism, online training, and the publication of versions during training.",
        "## Row stores",
        _stores(),
        "Key modes of a table: *dense* has one row per id, *hashed* shares a fixed number of rows, *dynamic* creates "
        "rows when ids are first used. *Eviction* is any of the policies lru, lfu and ttl.",
        "## Tables and parallelism",
        _parallelism(),
        "*Replica groups* are set by `parallel.num_replicas` (2D sparse parallelism), and `replica_sync.mode` selects "
        "how replicas of a row are synchronized.",
        "## Row optimizers",
        _row_optimizers(),
        "All row optimizers train in every row store, on CPUs and GPUs, with weights of 16 or 32 bits. Without a host "
        "loop or a GPU kernel, the reference formula computes the update, with the same results.",
        "## Precision",
        _precision(),
        "`training.precision` applies to GPUs; a CPU always computes in fp32. Table rows have their own data type, "
        "`tables.NAME.dtype`.",
        "## Serving",
        _serving(),
        "*Quantization* is `nestrec export` with `--dtype`, `--table_dtype` or `--kv_cache_dtype`. *Published "
        "versions* are those of `nestrec publish`, which servers load with `nestrec serve --follow`.",
    )


def _mark(condition: object) -> str:
    return "yes" if condition else "no"


def _passes(check: Callable[[], Any]) -> bool:
    try:
        check()
    except UserError:
        return False
    return True


def _tasks() -> str:
    rows = []
    for name in TASKS.built_in_names:
        make: Any = TASKS.find(name).make
        serving = serving_spec_of(TASKS.default_config(name, "config"))
        rows.append([
            code(name),
            ", ".join(code(kind) for kind in _backbones_of(name)),
            _mark(make.windows_by_time is not Task.windows_by_time),
            _mark(make.set_context_ring is not Task.set_context_ring),
            _mark(make.cost is not Task.cost),
            serving.role,
        ])  # fmt: skip
    head = ["task", "backbones", "online training", "context parallelism", "planning", "role in serving"]
    return table(head, rows)


def _backbones_of(task: str) -> tuple[str, ...]:
    """Return the backbones that a task can use."""
    cls = TASKS.find(task).config
    hint = typing.get_type_hints(cls, include_extras=True)["encoder"]
    if any(isinstance(each, PluginConfig) for each in getattr(hint, "__metadata__", ())):
        return BACKBONES.built_in_names
    return (TASKS.default_config(task, "config").encoder.kind,)


def _backbones() -> str:
    rows = []
    for name in BACKBONES.built_in_names:
        spec = BACKBONES.find(name)
        cfg = BACKBONES.default_config(name, "config")
        rows.append([
            code(name),
            _mark(spec.cached is not None),
            "no" if spec.times_field is None else code(f"encoder.{spec.times_field}"),
            _mark(hasattr(cfg, "attention")),
            _mark(spec.no_context_parallel_reason(cfg) is None),
            _mark(spec.has_fp8),
            _mark(spec.flops is not None and spec.activations is not None),
        ])  # fmt: skip
    head = [
        "backbone",
        "KV cache",
        "reads event times",
        "semi-local attention",
        "context parallelism",
        "fp8",
        "planning",
    ]
    return table(head, rows)


def _schedules() -> str:
    rows = []
    for name in SCHEDULES.built_in_names:
        spec = SCHEDULES.find(name)
        rows.append([
            code(name),
            _mark(spec.is_exact),
            _mark(spec.splits),
            _mark(spec.window_ms is not None),
            _mark(_supports_fsdp(name, "cpu")),
            _mark(_supports_fsdp(name, "cuda")),
            ", ".join(code(f"pipeline.{option}") for option in spec.options) or "none",
        ])  # fmt: skip
    head = ["schedule", "exact", "needs micro-batches", "automatic micro-batches", "FSDP on CPUs", "FSDP on GPUs",
            "own options"]  # fmt: skip
    return table(head, rows)


def _supports_fsdp(schedule: str, device: str) -> bool:
    task = TASKS.default_config("retrieval", "config")
    cfg = RunConfig(
        name="", task=task, pipeline=PipelineConfig(schedule=schedule), parallel=ParallelConfig(dense="fsdp")
    )
    ranks: Any = SimpleNamespace(world=2, device=torch.device(device), context=SimpleNamespace(size=1))
    return _passes(lambda: check_dense_sharding(cfg, ranks, is_stream=False))


def _store(kind: Any, **options: Any) -> StoreConfig:
    return StoreConfig(kind=kind, folder="rows" if kind == "disk" else "", **options)


def _stores() -> str:
    rows = []
    for kind in typing.get_args(typing.get_type_hints(StoreConfig)["kind"]):
        variants: list[dict[str, Any]] = [
            {"num_rows": 8},
            {"num_rows": 8, "is_hashed": True},
            {"num_rows": None},
            {"num_rows": None, "store": _store(kind, eviction_policy="lru", max_rows=8)},
            {"num_rows": 8, "placement": "replicated"},
            {"num_rows": 8, "dtype": "bfloat16"},
        ]
        rows.append([code(kind), *(_mark(_is_valid_table({"store": _store(kind), **one})) for one in variants)])
    return table(["store", "dense", "hashed", "dynamic", "eviction", "replicated", "16-bit weights"], rows)


def _is_valid_table(options: dict[str, Any]) -> bool:
    return _passes(lambda: check_tables([TableConfig(name="items", dim=8, **options)]))


def _parallelism() -> str:
    variants: dict[str, dict[str, Any]] = {
        "sharded, fixed number of rows": {"num_rows": 8},
        "sharded, dynamic": {},
        "sharded, dynamic with eviction or admission": {"store": _store("device", eviction_policy="lru", max_rows=8)},
        "sharded, 16-bit weights": {"num_rows": 8, "dtype": "bfloat16"},
        "replicated": {"num_rows": 8, "placement": "replicated"},
    }
    rows = []
    for name, options in variants.items():
        one = TableConfig(name="items", dim=8, **options)
        with_replicas = _fits(one, num_replicas=2, hosts=None)
        is_averaged = with_replicas and _passes(lambda one=one: check_weight_averaging([one]))
        hierarchical = _fits(one, num_replicas=1, hosts=object())
        rows.append([name, _mark(with_replicas), _mark(is_averaged), _mark(hierarchical)])
    head = ["table", "replica groups, `gradients`", "replica groups, `weights`", "hierarchical all-to-all"]
    return table(head, rows)


def _fits(one: TableConfig, **ranks: Any) -> bool:
    topology: Any = SimpleNamespace(**ranks)
    return _passes(lambda: check_placements([one], topology))


def _row_optimizers() -> str:
    rows = []
    for name in ROW_OPTIMIZERS.built_in_names:
        spec = ROW_OPTIMIZERS.find(name)
        values = [f"{column.name}: {'one per row' if column.is_row_wise else 'dim'}" for column in spec.state]
        rows.append([
            code(name),
            ", ".join(values) or "none",
            _mark(spec.host_loop is not None),
            _mark(spec.kernel is not None),
            ", ".join(code(field) for field in sorted(spec.reads)) or "none",
        ])  # fmt: skip
    head = ["row optimizer", "state values per row", "host loop (CPU)", "kernel (GPU)", "options"]
    return table(head, rows)


def _precision() -> str:
    precisions = typing.get_args(typing.get_type_hints(TrainingConfig)["precision"])
    kinds = dict.fromkeys(kind for task in TASKS.built_in_names for kind in _backbones_of(task))
    rows = [[code(kind), *(_mark(precision != "fp8" or _has_fp8(kind)) for precision in precisions)] for kind in kinds]
    return table(["backbone", *(code(precision) for precision in precisions)], rows)


def _has_fp8(kind: str) -> bool:
    return kind in BACKBONES and BACKBONES.find(kind).has_fp8


def _serving() -> str:
    rows = []
    for name in TASKS.built_in_names:
        cfg = TASKS.default_config(name, "config")
        serving = serving_spec_of(cfg)
        rows.append([
            code(name),
            serving.role,
            _mark(not isinstance(serving.encoder(cfg), NoBackboneConfig)),
            _mark(serving.index is not None),
            _mark(serving.reads_items),
            _mark(_passes(lambda cfg=cfg: check_publishable(cfg))),
            _mark(serving.reads_candidate_features),
            _mark(not serving.needs_event),
        ])  # fmt: skip
    head = ["task", "role", "KV cache", "item search", "quantization", "published versions", "candidate features",
            "users without events"]  # fmt: skip
    return table(head, rows)
