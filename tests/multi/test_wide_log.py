"""Logs of twelve columns: prepared and trained on in memory that their size does not decide."""

import pytest
import wide_log


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_wide_log_is_prepared_and_trained_on_without_being_held(tmp_path):
    found = wide_log.measure(tmp_path / "wide", 1_000_000, processes=2)
    assert found["prepare"]["peak_mib"] < 2048
    for rank in found["ranks"]:
        assert rank["decoded_mib"] < rank["all_columns_mib"], "columns that nothing reads are not decoded"
