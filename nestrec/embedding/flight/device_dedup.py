"""Deduplication of a batch's keys on the engine's device, for batches that would keep the host's loop too long.

The keys go over in one copy; what comes back is their number and then the distinct keys, for which the host has to
wait. It waits for a stream of its own, never for the training that is under way.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.transfer import to_device
from nestrec.embedding.hashing import owner_of
from nestrec.ops.rows.dedup_host import Deduplicated
from nestrec.ops.rows.dedup_keys import dedup_keys

MIN_KEYS = 1 << 16
"""Fewer keys are deduplicated sooner on the host."""
_INT32_KEYS = 1 << 31


def dedup_on_device(
    pieces: Sequence[NDArray[np.int64]],
    num_shards: int,
    device: torch.device,
    num_rows: int | None,
    *,
    num_on_host: int = 0,
) -> Deduplicated | None:
    """Distinct keys of all pieces, one after the other, as `dedup` of them; `index` takes the place of `inverse`.

    num_rows: keys are 0 to num_rows - 1, and none is returned where one is not; none: any key. num_on_host: of so many
    keys, the first ones, the host is told `inverse` too.
    """
    with _own_stream(device):
        sent = _send(pieces, device)
        is_narrow = num_rows is not None and num_rows <= _INT32_KEYS
        found = dedup_keys(sent.to(torch.int32) if is_narrow else sent)
        index = found.inverse()
        count, low, high = _to_host(torch.cat([found.count, torch.stack(torch.aminmax(sent))])).tolist()
        if num_rows is not None and (low < 0 or high >= num_rows):
            return None
        keys = _to_host(found.keys_P[:count].long()).numpy()
        inverse = _to_host(index[:num_on_host].int()).numpy() if num_on_host else np.empty(0, np.int32)
        if num_shards == 1:
            return Deduplicated(keys, inverse, np.array([count]), index)
        return _by_owner(keys, inverse, index, num_shards)


def _by_owner(
    keys: NDArray[np.int64], inverse: NDArray[np.int32], index: torch.Tensor, num_shards: int
) -> Deduplicated:
    owner = owner_of(keys, num_shards)
    order = np.argsort(owner, kind="stable")
    place = np.empty(len(keys), np.int32)
    place[order] = np.arange(len(keys), dtype=np.int32)
    counts = np.bincount(owner, minlength=num_shards).astype(np.int64)
    return Deduplicated(keys[order], place[inverse], counts, to_device(place, index.device)[index])


def _send(pieces: Sequence[NDArray[np.int64]], device: torch.device) -> torch.Tensor:
    """The pieces in one tensor of the device, joined on their way into pinned memory."""
    joined = torch.empty(sum(len(p) for p in pieces), dtype=torch.int64, pin_memory=device.type == "cuda")
    np.concatenate(pieces, out=joined.numpy())
    return joined.to(device, non_blocking=True)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(tensor.device))
    copied.synchronize()
    return host


class _Streams(threading.local):
    """A stream for each thread and device."""

    def __init__(self) -> None:
        self.of: dict[torch.device, torch.cuda.Stream] = {}


_streams = _Streams()


@contextlib.contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    if device not in _streams.of:
        _streams.of[device] = torch.cuda.Stream(device)
    with torch.cuda.stream(_streams.of[device]):
        yield
