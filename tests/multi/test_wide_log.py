"""Logs of twelve columns: the memory for preparation and training does not depend on the size of the log."""

import pytest
import wide_log


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_wide_log_memory_is_bounded(tmp_path):
    rows = list(wide_log.measure(tmp_path / "wide", 1_000_000, processes=2, appended=[100_000]))
    assert [row["what"] for row in rows] == ["log", "prepare", "train", "append"]
    assert all(row["together_mib"] < 2048 for row in rows if row["what"] in ("prepare", "append"))
    for rank in rows[2]["ranks"]:
        assert rank["decoded_mib"] < rank["all_columns_mib"], "unused columns are not decoded"
