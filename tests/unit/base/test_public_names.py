import pydoc

import nestrec


def test_dir_lists_the_public_names():
    names = dir(nestrec)
    assert set(nestrec.__all__) <= set(names)
    assert not {"TYPE_CHECKING", "_EXPORTS", "lazy_exports"} & set(names)


def test_help_describes_the_public_names():
    text = pydoc.plain(pydoc.render_doc(nestrec))
    assert "train(recipe" in text
    assert "class Table" in text
    assert "TYPE_CHECKING" not in text
