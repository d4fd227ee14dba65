"""Names that config fields had in files of earlier versions.

Run folders, exports, published versions and datasets contain configs as JSON. A field that was renamed is still read
under its former name; only the present name is written. Options that a user types are not translated: an unknown option
is an error that suggests the present name.
"""

from collections.abc import Mapping
from typing import Any

FORMER_NAMES: Mapping[str, Mapping[str, str]] = {
    "ApiKeyOptions": {
        "expires": "expires_at",
    },
    "AttentionSpanConfig": {
        "prefix": "num_prefix_tokens",
        "full_layers": "num_full_layers",
        "keep_last": "truncate_to",
        "keep_from": "truncate_from_layer",
        "keep_step": "truncate_step",
    },
    "BalanceConfig": {
        "tuning": "power_tuning",
        "replay": "replay_changes",
    },
    "BatchConfig": {
        "batch_samples": "batch_size",
        "workers": "num_workers",
        "prefetch": "prefetch_batches",
        "shuffle_block": "shuffle_block_size",
        "micro_batches": "num_micro_batches",
    },
    "BatchJobConfig": {
        "slide_events": "history_stride",
        "part_size": "part_users",
        "batch_tokens": "max_batch_tokens",
    },
    "DLRMConfig": {
        "bottom": "bottom_mlp",
        "top": "top_mlp",
        "num_categories": "num_categorical",
    },
    "DataConfig": {
        "prepare": "prepare_command",
    },
    "EngineConfig": {
        "tiers": "prefix_cache",
        "trigger": "preinfer",
        "prefix_dtype": "kv_cache_dtype",
        "captured": "cuda_graphs",
        "chunk_ms": "preinfer_chunk_ms",
        "max_queue_s": "max_queue_delay_s",
    },
    "ExportConfig": {
        "tables": "table_dtype",
        "prefixes": "kv_cache_dtype",
    },
    "FuXiConfig": {
        "normaliser_margin": "normalizer_margin",
        "recompute": "activation_checkpointing",
    },
    "HSTUConfig": {
        "normaliser_margin": "normalizer_margin",
        "recompute": "activation_checkpointing",
    },
    "HashingConfig": {
        "buckets": "num_buckets",
        "words": "word_ngrams",
        "characters": "char_ngrams",
        "max_ids": "max_ids_per_text",
    },
    "HeadConfig": {
        "hidden": "hidden_dims",
    },
    "HistoryConfig": {
        "max_length": "max_events",
    },
    "HistoryStoreConfig": {
        "prefix": "key_prefix",
    },
    "HostConfig": {
        "crowding": "core_contention",
        "copy_gb_per_s": "host_copy_gb_per_s",
    },
    "LimitsConfig": {
        "max_history": "max_history_events",
        "max_listed": "max_list_items",
        "max_user_characters": "max_user_id_length",
        "max_id_characters": "max_item_id_length",
        "max_text_characters": "max_text_length",
        "tells_prefix": "expose_cache_source",
        "head_timeout_s": "header_timeout_s",
        "answer_timeout_s": "write_timeout_s",
        "max_connections_an_address": "max_connections_per_address",
    },
    "Link": {
        "message_us": "per_peer_latency_us",
        "fan_in": "all_to_all_penalty",
    },
    "LogColumns": {
        "max_ahead_s": "max_future_s",
        "values": "outcome_features",
        "names": "column_names",
    },
    "LogConfig": {
        "requests": "access_log",
    },
    "NegativesConfig": {
        "sharing": "logit_sharing",
        "reach": "scope",
        "variant": "loss_variant",
        "lookup": "lookup_dtype",
        "memory_gib": "max_memory_gib",
    },
    "OptimizerConfig": {
        "clip_norm": "max_grad_norm",
        "decay": "lr_schedule",
        "decay_steps": "lr_decay_steps",
        "final_rate": "final_lr_fraction",
        "weight_decay_of": "weight_decay_on",
        "ema": "ema_decay",
    },
    "ParallelConfig": {
        "replicas": "num_replicas",
        "placement": "replica_layout",
        "exchange": "transport",
        "hierarchy": "hierarchical_all_to_all",
        "dense_bucket_mib": "grad_bucket_mib",
        "dense_overlap": "overlap_grad_reduce",
        "context": "context_parallel",
    },
    "PipelineConfig": {
        "replay": "replay_changes",
    },
    "PrefixCacheConfig": {
        "cache_bytes": "device_bytes",
        "dram_bytes": "host_bytes",
        "cache_ttl_s": "device_ttl_s",
        "dram_ttl_s": "host_ttl_s",
        "spill_above": "offload_threshold",
        "keeps_prefix": "enabled",
        "keeps_on_device": "keep_on_device",
        "reload": "reload_policy",
    },
    "PrepareOptions": {
        "max_bad_share": "max_bad_fraction",
        "user_core": "min_events_per_user",
        "item_core": "min_events_per_item",
        "core_passes": "core_filter",
        "min_user_events": "final_min_events_per_user",
        "new_items": "simulated_new_items",
        "fit_share": "fit_fraction",
        "memory_bytes": "sort_memory_bytes",
    },
    "PublishConfig": {
        "snapshot_every": "full_every_versions",
        "keep": "max_versions",
    },
    "RankingInputConfig": {
        "train_on": "train_events",
        "user_tokens": "user_feature_mode",
    },
    "RankingTaskConfig": {
        "at_once": "evaluation.listwise_events",
        "baseline_category": "evaluation.baseline_category",
        "baselines": "evaluation.baselines",
        "batch_slices": "evaluation.batch_size",
        "item_store": "table_store",
        "slices": "evaluation.slices",
        "windows_at_once": "evaluation.listwise_window_events",
    },
    "ReplicaSyncConfig": {
        "every": "every_steps",
        "state_every": "state_every_averages",
    },
    "RetrievalEvaluationConfig": {
        "batch_users": "batch_size",
        "headline": "main_metric",
        "sampled_negatives": "num_sampled_negatives",
        "max_targets": "max_targets_per_user",
    },
    "RetrievalInputConfig": {
        "user_tokens": "user_feature_mode",
        "context": "context_features",
        "actions": "target_actions",
    },
    "CriteoOptions": {
        "max_bad_share": "max_bad_fraction",
    },
    "CTRTaskConfig": {
        "batch_rows": "evaluation.batch_size",
        "test_share": "split.test_fraction",
        "valid_share": "split.valid_fraction",
    },
    "RetrievalTaskConfig": {
        "num_negatives": "negatives.num_negatives",
        "item_init": "table_init",
        "item_optimizer": "table_optimizer",
        "item_store": "table_store",
    },
    "RowOptimizerConfig": {
        "initial_accumulator": "initial_accumulator_value",
    },
    "RunConfig": {
        "ranks": "parallel",
    },
    "SearchConfig": {
        "links": "hnsw_m",
        "build_width": "hnsw_ef_construction",
        "width": "hnsw_ef_search",
        "lists": "ivf_nlist",
        "probes": "ivf_nprobe",
    },
    "SecurityConfig": {
        "keys": "api_keys",
        "certificate": "tls_certificate",
        "private_key": "tls_private_key",
    },
    "ServeConfig": {
        "front": "load_balancer",
        "front_processes": "frontend_workers",
        "front_awake_ms": "keep_awake_ms",
        "instances": "num_instances",
        "hosts": "allowed_hosts",
        "threads": "num_threads",
        "ray_gpus": "gpus_per_instance",
        "histories": "history_store",
        "safety": "security",
    },
    "ServiceConfig": {
        "instances": "engines_per_model",
        "slide_events": "history_stride",
        "preranked": "num_retrieved",
        "drain_s": "drain_timeout_s",
        "session_s": "session_timeout_s",
    },
    "SimilarityConfig": {
        "normalise": "normalize",
    },
    "SplitConfig": {
        "valid_share": "valid_fraction",
        "test_share": "test_fraction",
    },
    "StoreConfig": {
        "admission_count": "admission_threshold",
        "eviction": "eviction_policy",
    },
    "StreamConfig": {
        "replay_share": "replay_fraction",
        "max_bad_share": "max_bad_fraction",
        "poll_s": "poll_interval_s",
        "idle_s": "stop_after_idle_s",
        "changed_source": "on_source_change",
    },
    "TableColumns": {
        "labels": "display_columns",
        "left_out": "ignored_columns",
    },
    "TableConfig": {
        "half_features": "half_precision_features",
    },
    "TableOverrides": {
        "ids": "id_mode",
        "rows": "num_rows",
        "folder": "store_folder",
        "share": "shared_with",
        "admission_count": "admission_threshold",
        "eviction": "eviction_policy",
    },
    "TracingConfig": {
        "otlp": "otlp_endpoint",
        "sampled": "sample_rate",
    },
    "TrainingConfig": {
        "checkpoint_aside_mib": "checkpoint_buffer_mib",
        "checkpoint_address": "checkpoint_mirror",
        "incremental_saves": "incremental_checkpoints",
        "keep_checkpoints": "max_checkpoints",
        "evaluate_every_epochs": "eval_every_epochs",
        "patience": "early_stopping_patience",
        "dtype": "weight_dtype",
    },
    "TriggerConfig": {
        "budget_ms": "latency_budget_ms",
        "cache_share": "max_cache_fraction",
        "compute_share": "max_compute_fraction",
        "short_share": "min_budget_fraction",
        "least_gain": "min_gain",
        "first_life_s": "initial_lifetime_s",
        "life_margin_s": "lifetime_margin_s",
    },
    "VersionFollowConfig": {
        "on": "enabled",
        "poll_s": "poll_interval_s",
        "moves": "mode",
        "most_bytes": "max_delta_bytes",
    },
    "WindowRule": {
        "lateness_s": "allowed_lateness_s",
        "max_events": "max_rows",
    },
    "WindowsConfig": {
        "start": "start_time",
        "replay_share": "replay_fraction",
    },
}
"""Class of a config to the former names of its fields and their present names; a dotted name is a field of a part."""
FORMER_RANKING_INPUTS = ("max_events", "slide_events")
"""Fields that `RankingTaskConfig` had in its part `inputs`, and that are in `history` now."""


def with_present_names(cls: type, data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the data of a config with each former field name replaced by the present one.

    A former name is left alone if the data also contains the present name, so that the duplicate is reported as an
    unknown field.

    Args:
        cls: Class of the config.
        data: Its fields as plain data.

    Returns:
        `data` itself if it contains no former name.
    """
    if cls.__name__ == "RankingTaskConfig":
        data = _with_history(data)
    former = {old: new for base in cls.__mro__ for old, new in FORMER_NAMES.get(base.__name__, {}).items()}
    if former.keys().isdisjoint(data):
        return data
    renamed: dict[str, Any] = {}
    moved: dict[str, dict[str, Any]] = {}
    for name, value in data.items():
        part, dot, field = former.get(name, name).rpartition(".")
        if dot:
            moved.setdefault(part, {})[field] = value
        else:
            renamed[name if name in former and field in data else field] = value
    for part, fields in moved.items():
        renamed[part] = {**fields, **(renamed.get(part) or {})}
    return renamed


def _with_history(data: Mapping[str, Any]) -> Mapping[str, Any]:
    inputs = data.get("inputs")
    if not isinstance(inputs, Mapping) or inputs.keys().isdisjoint(FORMER_RANKING_INPUTS):
        return data
    history = {name: inputs[name] for name in FORMER_RANKING_INPUTS if name in inputs}
    other_inputs = {name: value for name, value in inputs.items() if name not in history}
    return {**data, "inputs": other_inputs, "history": {**history, **(data.get("history") or {})}}
