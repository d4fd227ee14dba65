"""A reader can follow one batch: few files, few crossings between folders, and the page that lists them is right."""

from batch_walk import BEFORE_TRAINING, PACKAGE, PAGE, STAGES, page, walk

MOST_FILES, MOST_CALLS = 20, 16


def test_one_batch_under_nested_goes_through_few_files_and_folders(pools):
    found = pools[2].run(walk)[0]
    assert set(found.stages) == set(STAGES), "every stage was seen"
    assert found.stages["train"] == ["training/trainer.py"]
    assert len(found.files) <= MOST_FILES, found.files
    assert found.num_calls <= MOST_CALLS, "calls from one folder into another"
    assert PAGE.read_text() == page(found), "write the page again: python tests/multi/batch_walk.py"


def test_walk_lists_files_that_exist():
    files = [file for listed in BEFORE_TRAINING.values() for file in listed]
    assert [file for file in files if not (PACKAGE / file).exists()] == []
