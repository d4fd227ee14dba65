"""Registry of backbones (sequence encoders).

The built-in backbones are `hstu`, `fuxi` and `sasrec`. Other packages add plugins as entry points of the group
`nestrec.backbones`.
"""

from typing import Annotated

from torch import nn

from nestrec.base.config_values import PluginConfig
from nestrec.base.plugins import PluginRegistry
from nestrec.models.backbone_spec import BackboneConfig, BackboneSpec, ForwardFlops
from nestrec.models.sequence import UNCACHED, CachedForward

BACKBONES: PluginRegistry[BackboneSpec] = PluginRegistry(
    "nestrec.backbones",
    "backbone",
    {
        "hstu": "nestrec.models.hstu:BACKBONE",
        "fuxi": "nestrec.models.fuxi:BACKBONE",
        "sasrec": "nestrec.models.sasrec:BACKBONE",
    },
    of=BackboneSpec,
)

CACHED_FORWARDS = {
    "hstu": "nestrec.models.cached.cached_forwards:HSTU_CACHED",
    "fuxi": "nestrec.models.cached.cached_forwards:FUXI_CACHED",
    "sasrec": "nestrec.models.cached.cached_forwards:SASREC_CACHED",
}
"""KV-cache forward passes of the built-in backbones, by the names that their specs use."""

EncoderConfig = Annotated[BackboneConfig, PluginConfig(BACKBONES)]
"""Config of any registered backbone; its field `kind` selects the backbone."""


def backbone_of(cfg: BackboneConfig) -> BackboneSpec:
    """Return the spec of the backbone that the config selects."""
    return BACKBONES.find(cfg.kind, field="encoder.kind")


def make_encoder(cfg: BackboneConfig) -> nn.Module:
    """Build the encoder of a config: a module that maps (T, D) input vectors and a `SequenceInfo` to (T, D) states."""
    return backbone_of(cfg).build(cfg)


def reads_times(cfg: BackboneConfig) -> bool:
    """Return whether a model of this config reads event times."""
    return backbone_of(cfg).reads_times(cfg)


def flops_of(cfg: BackboneConfig) -> ForwardFlops:
    """Return the floating-point operations of a forward pass.

    Raises:
        UserError: The spec of the backbone does not define `flops`.
    """
    if (flops := backbone_of(cfg).flops) is None:
        raise BACKBONES.missing_field_error(cfg.kind, "flops", "its number of floating-point operations is unknown")
    return flops(cfg)


def activations_of(cfg: BackboneConfig) -> float:
    """Return how many values per token the forward pass saves for the backward pass.

    Raises:
        UserError: The spec of the backbone does not define `activations`.
    """
    if (activations := backbone_of(cfg).activations) is None:
        raise BACKBONES.missing_field_error(cfg.kind, "activations", "the size of its saved activations is unknown")
    return activations(cfg)


def cached_forward_of(cfg: BackboneConfig) -> CachedForward:
    """Return the KV-cache forward pass that serving uses, or `UNCACHED` if the backbone does not have one."""
    cached = backbone_of(cfg).cached
    if isinstance(cached, str):
        cached = CACHED_FORWARDS.get(cached, cached)
    return UNCACHED if cached is None else BACKBONES.resolve_field(cfg.kind, "cached", cached, of=CachedForward)
