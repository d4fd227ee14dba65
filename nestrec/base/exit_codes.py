"""What a process tells its launcher when it ends."""

USER_ERROR = 2
"""A mistake of the user; the message is on standard error."""
NON_FINITE = 70
"""The loss became NaN or infinite; the last checkpoint is intact."""
INTERRUPTED = 75
"""SIGTERM or SIGINT: a checkpoint was written and the run can be resumed (as sysexits' EX_TEMPFAIL: try again)."""
PEER_LOST = 76
"""Another rank died; restart from the last checkpoint."""
ENGINE_LOST = 77
"""An engine of `nestrec serve` cannot continue; start the server again."""
