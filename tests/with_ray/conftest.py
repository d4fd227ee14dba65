"""Tests that need Ray: `make test-ray` runs them in the environment that `make ray` creates."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("ray") else ["test_*"]
