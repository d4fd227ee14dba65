"""Options of an engine."""

from nestrec.base.bounds import Count, NonNegative
from nestrec.base.config import config
from nestrec.serving.prefix.page_pool import PrefixDtype
from nestrec.serving.prefix.tiers import TiersConfig
from nestrec.serving.prefix.trigger import TriggerConfig


@config
class EngineConfig:
    tiers: TiersConfig = TiersConfig()
    """where prefixes are kept"""
    prefix_dtype: PrefixDtype = "model"
    """of the keys and values of prefixes: that of the model, bfloat16, or fp8 (half of that: twice the users in as many
    bytes); what 8 bits cost is measured by `nestrec export`"""
    captured: bool = True
    """on a GPU, batches are captured graphs over pages of prefixes; false: sequence by sequence, in plain operators"""
    max_batch_tokens: Count = 4096
    """new tokens of requests in a batch, candidates included; signals may add as many"""
    max_batch_requests: Count = 32
    """requests and signals of a batch"""
    chunk_ms: NonNegative | None = None
    """device milliseconds of a batch up to which signals fill it, by the learned costs (beside many requests a quarter
    of that all the same); none: a quarter of `trigger.budget_ms`, since a request waits for the rest of one batch and
    then for its own; 0: the tokens alone bound them"""
    max_queue_s: NonNegative = 0.25
    """device seconds of work that may wait; beyond it requests are refused, but for one behind the batch that is
    computed whose deadline allows it: without it the device would be idle at the end of that batch"""
    trigger: TriggerConfig = TriggerConfig()
    """what is computed ahead"""
