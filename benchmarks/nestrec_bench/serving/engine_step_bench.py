"""Measure the device time of an engine step: prefill of a prefix, ranking of candidates against it, and full inference.

nestrec bench engine --tokens 4096,8192 --candidates 256,512 --device cuda --dtype bfloat16 --encoder.dim 1024 \
    --encoder.num_layers 8 --encoder.num_heads 8 --encoder.head_dim 128
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch

from nestrec.base.config import config
from nestrec.models import FuXiConfig, HSTUConfig, SASRecConfig
from nestrec.models.backbone_registry import EncoderConfig
from nestrec.serving.engine.batch_scheduler import EngineConfig
from nestrec.serving.engine.reference_runner import BatchItem, BatchRunner
from nestrec.serving.engine.serving_engine import make_runner
from nestrec.serving.kv_cache.kv_page_pool import KVCacheDtype, pool_for
from nestrec.serving.model.model_adapter import make_adapter
from nestrec.serving.model.request_inputs import Candidates, History
from nestrec_bench.bench import Bench
from nestrec_bench.harness.random_model import random_ranking

_ITEMS = 1000
_NOW_MS = 10**11
_BIASES: dict[str, dict[str, Any]] = {
    "none": {"position_bias": False},
    "position": {},
    "tables": {"time_bias": True},
    "functional": {"time_bias": True, "time_encoding": "functional"},
}


@config
class EngineBenchConfig:
    encoder: HSTUConfig = HSTUConfig(dim=64, num_layers=2, num_heads=2, head_dim=32)
    """Sizes of all models; max_length is set according to the tokens."""
    models: tuple[str, ...] = ("none", "position", "tables", "functional", "none fp8", "tables fp8", "fuxi", "sasrec")
    """Models: HSTU by its biases, with fp8 for an 8-bit KV cache, and other backbones."""
    tokens: tuple[int, ...] = (512,)
    """Numbers of tokens of a prefix."""
    candidates: tuple[int, ...] = (64,)
    """Numbers of candidates that are ranked against a prefix."""
    rounds: int = 7
    """Number of rounds, in which all models take turns."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the models."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of weights and matrix products."""


def measure_engine(bench: EngineBenchConfig) -> Iterator[dict[str, Any]]:
    """Yield one row per model and step with medians over rounds; `of_first` is the speed relative to the first
    model."""
    runners = {name: _runner(bench, name) for name in bench.models}
    for tokens in bench.tokens:
        steps = [("prefix", 0, 0)] + [(s, f, c) for c in bench.candidates for s, f in (("rank", tokens), ("full", 0))]
        for step, first, num_candidates in steps:
            ms: dict[str, list[float]] = {name: [] for name in runners}
            for number in range(bench.rounds + 1):
                for name, runner in runners.items():
                    seconds = runner.launch([_part(runner, tokens, first, num_candidates)]).wait()[1]
                    if number:  # the first round may compile, and it ranks against pages without content
                        ms[name].append(1e3 * seconds)
            median = {name: float(np.median(values)) for name, values in ms.items()}
            for name, values in ms.items():
                yield {"model": name, "step": step, "tokens": tokens, "candidates": num_candidates, "ms": median[name],
                       "spread_ms": max(values) - min(values), "of_first": median[bench.models[0]] / median[name],
                       "dtype": bench.dtype, "device": bench.device, "in_process": True}  # fmt: skip


def _runner(bench: EngineBenchConfig, name: str) -> BatchRunner:
    kind = name.split(maxsplit=1)[0]
    cfg = replace(bench.encoder, max_length=max(bench.tokens) + 4)
    shape: dict[str, Any] = {"dim": cfg.dim, "num_layers": cfg.num_layers, "num_heads": cfg.num_heads}
    shape |= {"ffn_dim": cfg.dim, "max_length": cfg.max_length}
    encoder: EncoderConfig = SASRecConfig(**shape) if kind == "sasrec" else FuXiConfig(**shape, head_dim=cfg.head_dim)
    if kind in _BIASES:
        encoder = replace(cfg, **_BIASES[kind])
    adapter = make_adapter(
        random_ranking(encoder, num_items=_ITEMS, device=bench.device, dtype=getattr(torch, bench.dtype))
    )
    kv_cache_dtype: KVCacheDtype = "fp8" if "fp8" in name else "model"
    pool = pool_for(adapter.servable, cache_bytes=1, page_tokens=64)
    cache_bytes = (max(bench.tokens) + 64) * pool.token_bytes
    pool = pool_for(adapter.servable, cache_bytes=cache_bytes, page_tokens=64, kv_cache_dtype=kv_cache_dtype)
    return make_runner(adapter, pool, EngineConfig(max_batch_tokens=256))


def _part(runner: BatchRunner, tokens: int, first: int, num_candidates: int) -> BatchItem:
    rng = np.random.default_rng(0)
    events = tokens // 2
    tab = {"event_tab": rng.integers(0, 3, events)}
    times = np.sort(rng.integers(0, _NOW_MS, events))
    items = rng.integers(1, _ITEMS, events)
    history = History(items=items, times_ms=times, actions=rng.integers(0, 4, events), features=tab)
    candidates = None
    if num_candidates:
        shown = {"event_tab": rng.integers(0, 3, num_candidates)}
        candidates = Candidates(items=rng.integers(1, _ITEMS, num_candidates), now_ms=_NOW_MS, features=shown)
    return BatchItem(tokens=runner.adapter.tokens(history, _NOW_MS), first=first, end=tokens, candidates=candidates,
                pages=list(range(-(-tokens // 64))), store_until=tokens)  # fmt: skip


BENCH = Bench(config=EngineBenchConfig, measure=measure_engine)
