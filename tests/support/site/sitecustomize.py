"""Arms fail points in a process whose environment names some; see `support.fail_points`."""

import os

if os.environ.get("NESTREC_FAIL_POINTS"):
    import support.fail_points  # noqa: F401
