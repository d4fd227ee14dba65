"""Options of an engine."""

from nestrec.base.config import config
from nestrec.serving.tiers import TiersConfig
from nestrec.serving.trigger import TriggerConfig


@config
class EngineConfig:
    tiers: TiersConfig = TiersConfig()
    """where prefixes are kept"""
    max_batch_tokens: int = 4096
    """new tokens of a batch, candidates included"""
    max_batch_requests: int = 32
    """requests and signals of a batch"""
    chunk_tokens: int = 1024
    """new tokens of signals in a batch that ranks nothing; what a request may have to wait for"""
    mixed_chunk_tokens: int = 256
    """new tokens of signals in a batch that also ranks"""
    chunk_ms: float | None = None
    """device milliseconds that signals may add to a batch, by the learned costs; none: a quarter of
    `trigger.budget_ms`, since a request waits for the rest of one batch and then for its own; 0: the tokens alone bound
    them"""
    max_queue_s: float = 0.25
    """device seconds of work that may wait; beyond it requests are refused"""
    trigger: TriggerConfig = TriggerConfig()
    """what is computed ahead"""
