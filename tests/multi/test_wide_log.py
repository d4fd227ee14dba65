"""Logs of twelve columns: prepared and trained on in memory that their size does not decide."""

import pytest
import wide_log


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_wide_log_is_prepared_trained_on_and_appended_to_without_being_held(tmp_path):
    found = list(wide_log.measure(tmp_path / "wide", 1_000_000, processes=2, appended=[100_000]))
    assert [row["what"] for row in found] == ["log", "prepare", "train", "append"]
    assert all(row["together_mib"] < 2048 for row in found if row["what"] in ("prepare", "append"))
    for rank in found[2]["ranks"]:
        assert rank["decoded_mib"] < rank["all_columns_mib"], "columns that nothing reads are not decoded"
