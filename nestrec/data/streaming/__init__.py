"""Streams of events: where they come from, and how they are cut into windows."""
