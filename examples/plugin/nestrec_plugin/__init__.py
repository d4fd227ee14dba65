"""Extensions of nestrec in a package of their own: one file each, found by the entry points of pyproject.toml."""
