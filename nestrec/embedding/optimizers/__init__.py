"""Row optimisers: `rules` is the definition in torch, `host_loops` the same in fused host loops."""

from nestrec.embedding.optimizers.host_loops import can_update_on_host, update_rows_on_host
from nestrec.embedding.optimizers.rules import update_rows

__all__ = ["can_update_on_host", "update_rows", "update_rows_on_host"]
