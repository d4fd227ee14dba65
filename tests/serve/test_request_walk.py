"""A reader can follow one ranking request through few files, and the page that lists them is up to date."""

from request_walk import IN_PASSING, PAGE, TOOLS, WHAT_HAPPENS, page, stops, walk

MOST_FILES = 35
MOST_IN_PASSING = 2


def test_request_walk_has_few_files_and_a_current_page():
    found, stored = walk()
    assert len(stops(found)) <= MOST_FILES, stops(found)
    assert len(IN_PASSING) <= MOST_IN_PASSING
    assert TOOLS == ("base", "trace", "ops")
    assert set(WHAT_HAPPENS) == set(stops(found)) | set(stops(stored)), "one line for each file"
    assert PAGE.read_text() == page(found, stored), "write the page again: python tests/serve/request_walk.py"
