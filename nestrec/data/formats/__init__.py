"""One file for each input format of `nestrec prepare`."""
