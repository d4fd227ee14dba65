"""One training batch goes through few files and folders, and docs/architecture-walk.md lists them."""

from batch_walk import BEFORE_TRAINING, PACKAGE, PAGE, STAGES, page, walk

MAX_FILES, MAX_CALLS = 20, 16


def test_batch_walk_is_short_and_documented(pools):
    path = pools[2].run(walk)[0]
    assert set(path.stages) == set(STAGES), "every stage was traced"
    assert path.stages["train"] == ["training/trainer.py"]
    assert len(path.files) <= MAX_FILES, path.files
    assert path.num_calls <= MAX_CALLS, "calls from one folder into another"
    assert PAGE.read_text() == page(path), "update the page: python tests/multi/batch_walk.py"


def test_batch_walk_lists_existing_files():
    files = [file for group in BEFORE_TRAINING.values() for file in group]
    assert [file for file in files if not (PACKAGE / file).exists()] == []
