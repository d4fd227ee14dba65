"""The standard terms of the field occur in code and documents, so that a text search finds what nestrec has."""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TERMS = """
    KV cache; prefix cache; block table; prefill; chunked prefill; continuous batching; scheduler; admission control;
    load shedding; backpressure; queue delay; fair queuing; tail latency; P99; SLO; deadline; latency budget; warm-up;
    cold start; approximate nearest neighbor; frontend worker; gateway; load balancer; consistent hashing; bounded load;
    session affinity; rolling update; canary; hot swap; roll back; liveness; readiness; health check; graceful shutdown;
    drain; circuit breaker; connection pool; round trip; API key; authentication; authorization; rate limit;
    token bucket; retry; backoff; idempotent; open loop; CUDA graph;
    data loader; collate; prefetch; gradient accumulation; gradient clipping; micro-batch; learning rate; warm start;
    resume; checkpoint; incremental checkpoint; mirror; storage backend; retention; callback; trial;
    online training; test-then-train; early stopping; activation checkpointing;
    all-to-all; all-reduce; all-gather; reduce-scatter; broadcast; device mesh; data parallel; FSDP; row-wise;
    replicated; replica group; context parallel; ring attention; rendezvous; watchdog; flight recorder;
    embedding; lookup; unique keys; dynamic embedding table; admission; eviction; staleness; snapshot; copy-on-write;
    host offload; quantization; dequantize; fp8; int8;
    schema; vocabulary; quarantine; rejected rows; compaction; offset; watermark; allowed lateness; leave-last-out;
    ablation; reference implementation;
    atomic write; fsync; digest; manifest; corrupt; plugin; entry point; registry; fault injection
"""
"""Terms that engineers search for."""


def texts(patterns: Iterable[str]) -> str:
    files = [file for pattern in patterns for file in sorted(ROOT.glob(pattern)) if "results" not in file.parts]
    text = " ".join(file.read_text(encoding="utf-8") for file in files)
    return re.sub(r"[\s#*`\"_-]+", " ", text).lower()


@pytest.fixture(scope="module")
def code() -> str:
    return texts(["nestrec/**/*.py", "benchmarks/nestrec_bench/**/*.py"])


@pytest.fixture(scope="module")
def documents() -> str:
    return texts(["docs/**/*.md", "*.md"])


def missing(terms: str, text: str) -> list[str]:
    return [term for term in " ".join(terms.split()).split("; ") if term.lower().replace("-", " ") not in text]


def test_terms_occur_in_the_code(code: str) -> None:
    assert missing(TERMS, code) == []


def test_terms_occur_in_the_documents(documents: str) -> None:
    assert missing(TERMS, documents) == []


def test_terms_that_are_missing_are_found(code: str) -> None:
    assert missing("KV cache; flux capacitor", code) == ["flux capacitor"]
