"""The exchanges and the computation of one batch: in turn, or overlapped inside the frozen window.

    in turn     communication   E1    G1 E2    G2 E3    G3
                compute            F1       F2       F3

    overlapped  communication   E1 E2 G1 E3 G2    G3
                compute            F1    F2    F3

E: vectors of a micro-batch, G: its gradients, F: its forward and backward. Parameters change only after the window, so
an exchange may run beside any computation. `meanwhile` is called once what the first computation needs is submitted.
"""

from collections.abc import Callable

import torch

from nestrec.pipeline.lanes import Ticket
from nestrec.pipeline.machine import Machine
from nestrec.pipeline.phases import FetchedBatch
from nestrec.pipeline.window import Window

Ended = tuple[torch.Tensor, Ticket[None]]
"""Loss, and the last exchange of gradients."""


def in_turn(machine: Machine, now: FetchedBatch[Window], meanwhile: Callable[[], None]) -> Ended:
    """Each exchange is waited for."""
    loss = machine.zero()
    for i in range(now.num_micro_batches):
        coming = machine.vectors(now, i)
        if i == 0:
            meanwhile()
        coming.wait()
        loss = loss + machine.compute(now, i)
        going = machine.gradients(now, i)
    return loss, going


def overlapped(
    machine: Machine, now: FetchedBatch[Window], meanwhile: Callable[[], None], first: Ticket[None] | None = None
) -> Ended:
    """Only the first E and the last G are waited for, where an exchange of both kinds fits beside a computation.

    first: the first E, where it was submitted ahead of the step.
    """
    loss = machine.zero()
    coming = [first or machine.vectors(now, 0)]
    coming += [machine.vectors(now, 1)] if now.num_micro_batches > 1 else []
    meanwhile()
    for i in range(now.num_micro_batches):
        coming[i].wait()
        loss = loss + machine.compute(now, i)
        going = machine.gradients(now, i)
        if i + 2 < now.num_micro_batches:
            coming.append(machine.vectors(now, i + 2))
    return loss, going
