"""How ranks are arranged."""

from typing import Literal

from nestrec.base.bounds import Count, Positive
from nestrec.base.config import config

Placement = Literal["shards_contiguous", "replicas_contiguous"]
ExchangeKind = Literal["auto", "collectives", "host", "copy_engine", "shared_memory"]


@config
class RanksConfig:
    replicas: Count = 1
    """groups of ranks that each hold all rows; a divisor of the number of ranks. Exchanges of vectors stay inside a
    group, and copies of a row are kept alike as replica_sync says"""
    placement: Placement = "shards_contiguous"
    """which ranks form a group: neighbours (vectors stay inside a host), or every so-many-th rank (the copies of a row
    lie inside a host)"""
    exchange: ExchangeKind = "auto"
    """how vectors and gradients get from device to device: collectives (NCCL, Gloo), host (over pinned host memory and
    Gloo, for any network), copy_engine (peer copies inside one NVLink domain) or shared_memory (between CPU ranks of
    one host; keys too). auto takes shared_memory where ranks are on CPUs of one host, host where several ranks share a
    device, which NCCL cannot, and else collectives"""
    hierarchy: bool = False
    """rows cross between hosts once for all ranks of a host that ask for them: each rank asks for them on behalf of its
    host, which sums the gradients before they leave. Takes hosts with equally many ranks of a group; to rounding equal
    to leaving it out, and every schedule to `serial` as always"""
    dense: Literal["replicated", "fsdp"] = "replicated"
    """dense weights: all of them on every rank, or of the encoder's layers a slice on each, with its gradients, moments
    and running means (torch's `fully_shard`), which is equal to rounding. On GPUs with the serial schedule only"""
    dense_bucket_mib: Positive = 25.0
    """dense gradients are summed over ranks in buckets of about this many MiB, those of the last layers first. Another
    size is equal to rounding"""
    dense_overlap: bool = True
    """the sum of a bucket begins as soon as the backward pass of the last micro-batch has its gradients, beside the
    rest of the pass; all but the last bucket. Changes no bit"""
    context: Count = 1
    """neighbouring ranks that hold every sequence together, each a part of its tokens, for histories that do not fit
    one device; a divisor of the number of ranks. Samples are dealt to groups of so many ranks"""
