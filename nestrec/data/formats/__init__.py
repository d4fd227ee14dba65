"""Input formats of `nestrec prepare`, one file per format."""
