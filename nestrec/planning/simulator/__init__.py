"""Discrete-event simulator of training steps: records a schedule once and replays it with a cost model on any number of
ranks."""
