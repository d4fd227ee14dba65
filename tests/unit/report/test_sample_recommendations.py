from nestrec.report.result_sections import Sample, samples


def test_sample_recommendations_show_titles_and_target() -> None:
    sample_list = [Sample("<ann>", ["1", "2"], ["3", "4"], "4"), Sample("bob", ["9"], ["1"], "7")]
    page = str(samples(sample_list, {"1": "One", "4": "Four & more"}))
    assert "<b>Four &amp; more ✓</b>" in page
    assert page.count("✓") == 1
    assert "&lt;ann&gt;" in page
    assert "<li>One</li>" in page
    assert "<td>7</td>" in page
    assert samples([], {}) is None
