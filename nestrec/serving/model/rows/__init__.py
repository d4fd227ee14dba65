"""Models of labelled rows, which know neither histories nor a catalogue."""
