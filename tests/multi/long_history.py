"""Measures the memory, compute and traffic per rank of a context-parallel group for one long history.

    python tests/multi/long_history.py --tokens 20000 --layers 1 --json FILE

The script runs one forward and backward pass of HSTU. `kept_mib` is the memory of the activations that autograd saves
for the backward pass (maximum over ranks), `pairs_of_most` the largest number of pairs of a rank divided by the mean,
and `sent_mib` the traffic of a rank in the pass. `loss_difference` and `gradient_difference` are relative differences
from one rank.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from schedule_jobs import regrouped

from nestrec.distributed import Topology
from nestrec.distributed.collectives import all_reduce_sum
from nestrec.distributed.context_ring import ContextRing
from nestrec.distributed.topology import ParallelConfig
from nestrec.models.hstu import HSTU, HSTUConfig
from nestrec.models.sequence import SequenceInfo
from nestrec.ops.attention.mask_and_bias import PLAIN
from nestrec.ops.context_parallel.ring_sum import ContextParallelGroup
from nestrec.ops.context_parallel.token_partition import TokenPartition, blocks_of
from nestrec.report.result_file import write_frame
from support.rank_pool import RankPool

Result = dict[str, Any]


def one_pass(topology: Topology, num_tokens: int, num_layers: int) -> Result:
    """Run a forward and backward pass and return the measurements of this rank."""
    topology = regrouped(topology, ParallelConfig(context_parallel=topology.world))
    ring = ContextRing(topology)
    parts = TokenPartition(np.array([num_tokens]), topology.world)
    torch.manual_seed(1)
    device = topology.device
    model = HSTU(HSTUConfig(dim=32, head_dim=32, num_layers=num_layers, dropout=0.1, max_length=num_tokens)).to(device)
    indices = torch.from_numpy(parts.global_indices(ring.rank))
    vectors = torch.randn(num_tokens, 32)[indices].to(device).requires_grad_()
    info = SequenceInfo(
        offsets=torch.from_numpy(parts.offsets(ring.rank)).to(device),
        max_length=num_tokens,
        position_T=torch.from_numpy(parts.positions(ring.rank)).to(device),
        token_key_T=(indices * 977).to(device),
        context=ContextParallelGroup(parts, ring),
    )
    saved_bytes: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def record_saved(x: torch.Tensor) -> torch.Tensor:
        memory = x.untyped_storage()
        if memory.data_ptr() not in weights:
            saved_bytes[memory.data_ptr()] = memory.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(record_saved, lambda x: x):
        states = model(vectors, info)
    loss = states.square().sum() / num_tokens
    loss.backward()
    sums = torch.cat([loss.detach()[None], *(p.grad.flatten() for p in model.parameters() if p.grad is not None)])
    all_reduce_sum(topology.dense, sums)
    pairs = [b.num_pairs for p in range(parts.size) for b in blocks_of(parts, ring.rank, p, PLAIN)]
    return {"saved": sum(saved_bytes.values()), "pairs": sum(pairs), "sent": ring.bytes_sent, "sums": sums.cpu()}


def row_of(world: int, tokens: int, results: list[Result], alone: torch.Tensor) -> dict[str, Any]:
    pairs = [rank["pairs"] for rank in results]
    sums = results[0]["sums"].double()
    return {
        "ranks": world,
        "tokens": tokens,
        "kept_mib": round(max(rank["saved"] for rank in results) / 2**20, 2),
        "pairs_of_most": round(max(pairs) / (sum(pairs) / world), 4),
        "sent_mib": round(max(rank["sent"] for rank in results) / 2**20, 2),
        "loss_difference": float(f"{abs(sums[0] / alone[0] - 1):.1e}"),
        "gradient_difference": float(f"{(sums[1:] - alone[1:]).norm() / alone[1:].norm():.1e}"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--worlds", default="2,4")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = [one_pass(Topology.single(options.device), options.tokens, options.layers)]
    alone = results[0]["sums"].double()
    rows = [row_of(1, options.tokens, results, alone)]
    print(json.dumps(rows[-1]), flush=True)
    for world in map(int, options.worlds.split(",")):
        pool = RankPool(world, timeout_s=600, device=options.device)
        results = pool.outcomes(one_pass, options.tokens, options.layers, timeout_s=600)
        assert all(isinstance(each, dict) for each in results), results
        rows.append(row_of(world, options.tokens, results, alone))
        print(json.dumps(rows[-1]), flush=True)
        pool.close()
        if options.json:
            write_frame(options.json, bench="context", command=f"python {' '.join(sys.argv)}", rows=rows)


if __name__ == "__main__":
    main()
