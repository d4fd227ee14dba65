"""Loaded last by the server that ranks are forked from: what numba sets up at its first use, once for all of them.

What is loaded by now is never garbage: a rank that looked through it would copy all of its pages.
"""

import gc

from numba.core.registry import cpu_target

cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
gc.freeze()
