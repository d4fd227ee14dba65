"""Transports between processes that share one GPU."""

import pytest
import torch

from nestrec.bench.exchange import ExchangeBench, measure_exchange

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("transport", ["host", "copy_engine"])
def test_what_arrives_is_what_gloo_brings(transport, ranks):
    assert torch.cuda.is_available()
    bench = ExchangeBench(ranks=(ranks,), transports=(transport,), bytes=(1 << 25,), rounds=1, matmul_rounds=1)
    rows = measure_exchange(bench)
    assert all(row["equal_to_gloo"] for row in rows)
