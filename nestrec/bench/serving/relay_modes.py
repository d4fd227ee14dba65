"""Ways of serving that `nestrec bench relay` compares: same kernels, batches and engine, other rules for prefixes."""

from dataclasses import dataclass
from typing import Literal

from nestrec.base.errors import UserError, did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """Where prefixes are kept, when they are computed, and what is wrong with an ablation."""

    policy: Literal["never", "at_risk", "all"] = "never"
    """of the trigger; `never` sends no signals"""
    keeps_prefix: bool = True
    keeps_on_device: bool = True
    uses_dram: bool = False
    fetches_always: bool = False
    """what DRAM has is fetched even where computing it would be sooner"""
    strays: float = 0.0
    """share of ranking requests that reach another instance than their signal did"""
    fetch_gb_per_s: float = 0.0
    """emulated network between an instance and its second tier; 0: memory of the same machine"""

    @property
    def sends_signals(self) -> bool:
        return self.policy != "never"


MODES = {
    "full": Mode(keeps_prefix=False),
    "dram_fetch": Mode(keeps_on_device=False, uses_dram=True, fetches_always=True),
    "relay": Mode(policy="at_risk"),
    "relay_dram": Mode(policy="at_risk", uses_dram=True),
}
ABLATIONS = {
    "reactive": Mode(uses_dram=True),
    "relay_all": Mode(policy="all", uses_dram=True),
    "no_affinity": Mode(policy="at_risk", uses_dram=True, strays=0.5),
    "remote_fetch": Mode(
        policy="at_risk", keeps_on_device=False, uses_dram=True, fetches_always=True, fetch_gb_per_s=12.5
    ),
}
"""no_affinity: one of two instances between which requests are shared out at random. remote_fetch: what ranking has
consumed is kept by another machine behind 100 Gbit/s, and every return fetches it from there."""


def mode_named(name: str) -> Mode:
    known = {**MODES, **ABLATIONS}
    if name not in known:
        raise UserError("is no way of serving", field="modes", value=name, remedy=did_you_mean(name, known))
    return known[name]
