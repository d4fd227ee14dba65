"""Runs all kernels on small jagged shapes, forward and backward, for a memory checker: see test_sanitizer_gpu.py.

python tests/gpu/small_shapes.py
"""

import numpy as np
import torch

from nestrec.jagged import offsets_of
from nestrec.models import HSTU, FuXi, FuXiConfig, HSTUConfig, SequenceInfo
from nestrec.ops.attention.hstu_attention import hstu_attention
from nestrec.ops.attention.mask_and_bias import AttentionMask, RelativeBias
from nestrec.ops.embedding.dedup_keys import dedup_keys
from nestrec.ops.embedding.row_gather import gather_rows
from nestrec.ops.embedding.row_update import RowRule, update_rows
from nestrec.ops.losses.cross_entropy import tiled_cross_entropy
from nestrec.ops.losses.item_losses import LossCandidates
from nestrec.ops.losses.sampled_losses import grouped_loss, sampled_loss
from nestrec_bench.kernels.layer_bench import info_of

LENGTHS = [3, 0, 65, 1, 130]


def attention(dim: int, *, has_options: bool) -> None:
    tokens = sum(LENGTHS)
    longest = max(LENGTHS)
    q, k, v = (torch.randn(tokens, 2, dim, device="cuda").bfloat16().requires_grad_() for _ in range(3))
    bias = RelativeBias()
    rules = AttentionMask()
    if has_options:
        time = torch.arange(tokens, device="cuda", dtype=torch.float64) * 977.0
        bias = RelativeBias(
            position_table=torch.randn(2 * longest + 1, device="cuda", requires_grad=True),
            time_table=torch.randn(33, device="cuda", requires_grad=True) if dim in (48, 128) else None,
            time_T=time,
            query_time_T=time + 5.0,
        )
        targets = torch.tensor([1, 0, 20, 1, 0], device="cuda")
        rules = AttentionMask(num_targets_B=targets, num_context=3, max_attention_length=70)
    out = hstu_attention(
        q, k, v, offsets_of(torch.tensor(LENGTHS)).cuda(), max_length=longest, normalizer=100.0, bias=bias, rules=rules
    )
    out.float().square().sum().backward()


def layers(*, recompute: bool) -> None:
    info = info_of(np.array(LENGTHS), "cuda")
    time = info.position_T.double() * 77.0
    info = SequenceInfo(info.offsets, info.max_length, info.position_T, info.token_key_T, time, time + 50.0)
    sizes = {"dim": 72, "num_heads": 2, "head_dim": 64, "max_length": 130, "activation_checkpointing": recompute}
    for model in (HSTU(HSTUConfig(**sizes)), FuXi(FuXiConfig(ffn_dim=72, **sizes))):
        with torch.autocast("cuda", torch.bfloat16):
            out = model.cuda()(torch.randn(sum(LENGTHS), 72, device="cuda"), info)
        out.float().square().sum().backward()


def losses() -> None:
    query, rows = (torch.randn(n, 50, device="cuda", requires_grad=True) for n in (130, 40))
    index = torch.randint(40, (130, 9), device="cuda", dtype=torch.int32)
    index[:, 4:7] = 11
    group = torch.full((3, 50), -1, device="cuda", dtype=torch.int32)
    group.view(-1)[:130] = torch.randperm(130, device="cuda")
    for loss in (
        sampled_loss(query, rows, LossCandidates(index), "sampled_softmax", variant="fused"),
        grouped_loss(query, rows, index[:, 0], group, "sampled_softmax"),
        tiled_cross_entropy(query, rows, index[:, 0].long(), tile_tokens=64, tile_items=16),
    ):
        loss.sum().backward()


def rows() -> None:
    keys = torch.randint(100, (700,), device="cuda")
    keys[100:500] = 7
    found = dedup_keys(keys)
    weight = torch.randn(100, 33, device="cuda", requires_grad=True)
    gather_rows(weight, found.inverse()).square().sum().backward()
    with torch.no_grad():
        rule = RowRule(kind="rowwise_adagrad", learning_rate=0.1, eps=1e-8)
        update_rows(weight, [torch.zeros(100, 1, device="cuda")], weight.grad, rule)


if __name__ == "__main__":
    torch.manual_seed(0)
    for dim in (48, 64, 128, 256):
        attention(dim, has_options=False)
        attention(dim, has_options=True)
    layers(recompute=False)
    layers(recompute=True)
    losses()
    rows()
    torch.cuda.synchronize()
    print("all kernels ran")
