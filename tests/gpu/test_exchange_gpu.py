"""Transports between processes that share one GPU."""

from typing import Any

import pytest
import torch

from nestrec_bench.kernels.exchange_bench import ExchangeBenchConfig, measure_exchange

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    assert torch.cuda.is_available()
    return measure_exchange(ExchangeBenchConfig(ranks=(2, 4), bytes=(1 << 25,), rounds=1, matmul_rounds=1))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("transport", ["host", "copy_engine"])
def test_transports_equal_gloo_all_to_all(rows, transport, ranks):
    exchanged = [row for row in rows if (row["transport"], row["ranks"]) == (transport, ranks) and "beside" not in row]
    assert [row.get("equal_to_gloo") for row in exchanged] == [True], exchanged


@pytest.mark.parametrize("transport", ["host", "copy_engine"])
def test_exchange_copies_launch_no_kernels(rows, transport):
    device_work = {row["transport"]: row["device_work"] for row in rows if row.get("beside") == transport}
    assert device_work[transport]
    assert all(work.startswith("Memcpy") for work in device_work[transport])
    assert not any(work.startswith("Memcpy") for work in device_work["sm_copy"])
