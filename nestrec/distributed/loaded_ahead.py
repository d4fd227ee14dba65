"""Loaded by the server that ranks are forked from: what numba sets up at its first use, once for all of them."""

from numba.core.registry import cpu_target

cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
