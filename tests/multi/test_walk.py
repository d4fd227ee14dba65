"""A reader can follow one batch: few files, few crossings between folders, and the page that lists them is right."""

from batch_walk import PAGE, STAGES, page, walk

MOST_FILES, MOST_CALLS = 25, 15


def test_one_batch_under_nested_goes_through_few_files_and_folders(pools):
    found = pools[2].run(walk)[0]
    assert set(found.stages) == set(STAGES), "every stage was seen"
    assert len(found.files) <= MOST_FILES, found.files
    assert found.num_calls <= MOST_CALLS, "calls from one folder into another"
    assert PAGE.read_text() == page(found), "write the page anew: python tests/multi/batch_walk.py"
