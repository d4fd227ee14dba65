"""Option names of other frameworks, for the "did you mean" of unknown options.

Users of PyTorch, Hugging Face, Lightning, RecBole, RecTools, TorchRec, torchtitan, Megatron, vLLM, SGLang, uvicorn and
Kafka type the names they know. A name is looked up by its last dotted part, in lower case and with underscores for
hyphens.
"""

from collections.abc import Mapping

_SYNONYMS: tuple[tuple[str, str], ...] = (
    # optimizer
    ("lr learning_rate base_lr optimizer", "optimizer.learning_rate"),
    ("betas", "optimizer.beta1 optimizer.beta2"),
    ("adam_beta1", "optimizer.beta1"),
    ("adam_beta2", "optimizer.beta2"),
    ("adam_epsilon", "optimizer.eps"),
    ("max_grad_norm clip grad_clip clip_grad_norm gradient_clip_val clip_norm", "optimizer.max_grad_norm"),
    ("scheduler lr_scheduler lr_scheduler_type lr_decay_style", "optimizer.lr_schedule"),
    ("warmup num_warmup_steps warmup_ratio", "optimizer.warmup_steps"),
    ("decay_steps num_training_steps lr_decay_iters", "optimizer.lr_decay_steps"),
    ("min_lr min_lr_ratio min_lr_factor lr_end", "optimizer.final_lr_fraction"),
    ("ema use_ema ema_rate", "optimizer.ema_decay"),
    ("learner optim optimizer_type embedding_optimizer", "table_optimizer.kind"),
    ("wd", "optimizer.weight_decay"),
    # batches
    ("bs batch_size global_batch_size train_batch_size per_device_train_batch_size", "batch.batch_size part_users"),
    ("eval_batch_size per_device_eval_batch_size test_batch_size", "evaluation.batch_size"),
    ("max_tokens tokens_per_batch", "batch.batch_tokens"),
    ("shuffle", "batch.order"),
    ("gradient_accumulation_steps accumulate_grad_batches microbatches", "batch.num_micro_batches"),
    ("num_workers dataloader_num_workers worker", "batch.num_workers num_instances"),
    ("prefetch_factor prefetch_size dataloader_prefetch_factor", "batch.prefetch_batches"),
    # training
    ("n_epochs num_epochs max_epochs num_train_epochs", "training.epochs"),
    ("steps num_steps limit_train_batches fast_dev_run", "training.max_steps"),
    ("use_gpu gpu_id cuda no_cuda use_cpu accelerator recommend_torch_device", "training.device device"),
    ("bf16 fp16 amp mixed_precision torch_dtype enable_amp half_precision_backend", "training.precision"),
    ("checkpoint_every save_steps save_strategy save_interval checkpoint_interval", "training.checkpoint_every_steps"),
    ("save_total_limit keep_latest_k", "training.max_checkpoints"),
    (
        "eval_steps eval_step eval_strategy evaluation_strategy check_val_every_n_epoch val_check_interval",
        "training.eval_every_epochs",
    ),
    ("patience stopping_step early_stopping", "training.early_stopping_patience"),
    ("metric_for_best_model valid_metric monitor", "evaluation.main_metric"),
    ("filter_viewed repeatable", "evaluation.filter_seen exclude_seen"),
    ("topk k_list metrics", "evaluation.ks"),
    ("top_k", "k"),
    # model
    ("model model_type architecture", "encoder.kind"),
    (
        "hidden_size hidden_units hidden_dim d_model n_embd n_factors emb_dim embedding_size embedding_dim",
        "encoder.dim",
    ),
    ("layers num_hidden_layers n_layers n_layer num_blocks n_blocks", "encoder.num_layers"),
    ("heads num_attention_heads n_heads n_head nhead", "encoder.num_heads"),
    ("intermediate_size inner_size dim_feedforward", "encoder.ffn_dim"),
    ("hidden_act act_fn activation_fn activation_function", "encoder.activation"),
    (
        "hidden_dropout_prob attn_dropout_prob attention_probs_dropout_prob attention_dropout dropout_prob "
        "dropout_rate",
        "encoder.dropout",
    ),
    ("use_pos_emb use_position_embedding", "encoder.position_bias"),
    ("num_time_bins relative_attention_num_buckets", "encoder.num_time_buckets"),
    ("initializer_range init_std", "table_init.scale"),
    ("logits_t tau", "similarity.temperature"),
    ("similarity_module_type", "similarity.normalize"),
    (
        "maxlen max_len seq_len seq_length max_seq_len max_seq_length max_sequence_length session_max_len "
        "max_item_list_length max_position_embeddings n_positions",
        "history.max_events encoder.max_length",
    ),
    ("gradient_checkpointing recompute", "encoder.activation_checkpointing"),
    ("sliding_window attention_window", "attention.window"),
    ("loss_type loss_fn criterion", "task.loss"),
    (
        "negatives neg_sampling train_neg_sample_args negative_samples num_neg n_negatives",
        "negatives.num_negatives negatives.sampler",
    ),
    # data
    ("data data_dir data_path dataset", "data.folder"),
    ("user_id user_id_field user_col user_column", "log.user"),
    ("item_id item_id_field item_col item_column", "log.item"),
    ("timestamp time_field time_col time_column", "log.time"),
    ("rating_field rating_col weight_field", "log.rating"),
    ("delimiter sep field_separator", "log.separator"),
    ("seq_separator", "log.list_separator"),
    ("val_interval", "min_rating"),
    ("threshold", "positive_rating"),
    ("rm_dup_inter drop_duplicates", "duplicates"),
    ("user_inter_num_interval train_min_user_interactions", "min_events_per_user"),
    ("item_inter_num_interval", "min_events_per_item"),
    ("k_core min_interactions", "min_events_per_user min_events_per_item"),
    ("split_ratio eval_args test_size leave_one_out", "split.kind split.valid_fraction split.test_fraction"),
    # parallelism
    ("pipeline_type trainpipelinesparsedist prefetchtrainpipelinesparsedist", "pipeline.schedule"),
    ("fsdp data_parallel_shard_degree fully_shard", "parallel.dense"),
    ("strategy", "parallel.dense"),
    ("data_parallel_replicate_degree num_groups", "parallel.num_replicas"),
    ("context_parallel_degree cp_size sequence_parallel", "parallel.context_parallel"),
    ("bucket_cap_mb", "parallel.grad_bucket_mib"),
    # server
    ("kv_cache_dtype cache_dtype", "engine.kv_cache_dtype"),
    ("max_num_batched_tokens", "engine.max_batch_tokens"),
    ("max_num_seqs", "engine.max_batch_requests"),
    ("enforce_eager cuda_graph use_cuda_graph", "engine.cuda_graphs"),
    ("enable_prefix_caching disable_radix_cache", "prefix_cache.enabled"),
    ("block_size page_size", "prefix_cache.page_tokens"),
    (
        "gpu_memory_utilization mem_fraction_static kv_cache_memory_bytes num_gpu_blocks_override",
        "prefix_cache.device_bytes",
    ),
    ("swap_space cpu_offload_gb kv_offloading_size", "prefix_cache.host_bytes"),
    ("chunked_prefill_size long_prefill_token_threshold", "engine.preinfer_chunk_ms"),
    ("max_model_len context_length", "limits.max_history_events"),
    ("limit_concurrency", "limits.max_connections"),
    ("timeout_graceful_shutdown", "service.drain_timeout_s"),
    ("api_server_count num_api_servers", "frontend_workers"),
    ("workers", "batch.num_workers frontend_workers num_instances"),
    (
        "num_replicas replicas data_parallel_size dp_size",
        "num_instances service.engines_per_model parallel.num_replicas",
    ),
    ("api_key", "security.api_keys"),
    ("ssl_certfile", "security.tls_certificate"),
    ("ssl_keyfile", "security.tls_private_key"),
    ("otlp_traces_endpoint otel_exporter_otlp_endpoint", "tracing.otlp_endpoint"),
    ("access_log disable_log_requests log_requests", "log.access_log"),
    ("redis_url redis_host", "history_store.url"),
    ("quantization quantize load_in_8bit", "table_dtype"),
)
_EXPLANATIONS: tuple[tuple[str, str], ...] = (
    ("output_dir checkpoint_dir save_dir default_root_dir logging_dir", "set the run folder with --output"),
    ("resume resume_from_checkpoint ckpt_path", "to resume, run the same command again with the same --output"),
    ("pretrained init_from initial_load_path model_name_or_path", "name a run folder with --warm-start"),
    ("nproc_per_node nproc world_size num_gpus devices", "start N ranks with nestrec launch -n N"),
    ("load_best_model_at_end", "commands use the best weights by default; --last selects the last ones"),
    ("tensor_parallel_size tp_size", "a model must fit one device; --tables.index_devices splits the retrieval index"),
    ("bootstrap_servers topic group_id", "name the stream as kafka://BROKERS/TOPIC"),
    ("auto_offset_reset", "offsets are stored with the dataset; a new stream is read from its beginning"),
    ("num_embeddings vocab_size", "set --tables.NAME.num_rows for a hashed table; others count the ids of the dataset"),
    ("sharding_type row_wise data_parallel", "set --tables.NAME.placement to sharded or replicated"),
    (
        "compute_kernel fused_uvm fused_uvm_caching cache_load_factor",
        "set --tables.NAME.store and --tables.NAME.cache_rows",
    ),
)


def _by_name(rows: tuple[tuple[str, str], ...]) -> dict[str, str]:
    return {name: value for names, value in rows for name in names.split()}


SYNONYMS: Mapping[str, tuple[str, ...]] = {name: tuple(ends.split()) for name, ends in _by_name(_SYNONYMS).items()}
"""Names of options elsewhere, and the last parts of the names of our options that correspond."""
EXPLANATIONS: Mapping[str, str] = _by_name(_EXPLANATIONS)
"""Names of options elsewhere without a corresponding option, and what to do instead."""
