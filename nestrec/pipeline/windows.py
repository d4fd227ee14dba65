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
from nestrec.pipeline.machine import InFlight, Machine
from nestrec.pipeline.stages import Rates

Ended = tuple[torch.Tensor, Ticket[None]]
"""Loss, and the last exchange of gradients."""


def in_turn(machine: Machine, now: InFlight, rates: Rates, meanwhile: Callable[[], None]) -> Ended:
    """Each exchange is waited for."""
    loss = machine.zero()
    for i in range(now.num_parts):
        coming = machine.vectors(now, i)
        if i == 0:
            meanwhile()
        coming.wait()
        loss = loss + machine.compute(now, i)
        going = machine.gradients(now, i, rates)
    return loss, going


def overlapped(machine: Machine, now: InFlight, rates: Rates, meanwhile: Callable[[], None]) -> Ended:
    """Only the first E and the last G are waited for, where an exchange of both kinds fits beside a computation."""
    loss = machine.zero()
    coming = [now.first_vectors or machine.vectors(now, 0)]
    coming += [machine.vectors(now, 1)] if now.num_parts > 1 else []
    meanwhile()
    for i in range(now.num_parts):
        coming[i].wait()
        loss = loss + machine.compute(now, i)
        going = machine.gradients(now, i, rates)
        if i + 2 < now.num_parts:
            coming.append(machine.vectors(now, i + 2))
    return loss, going
