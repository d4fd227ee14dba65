"""The backbones by name: ours, and those that other packages bring as entry points of `nestrec.backbones`."""

from typing import Annotated

from torch import nn

from nestrec.base.config_values import PluginConfig
from nestrec.base.plugins import PluginRegistry
from nestrec.models.backbone_spec import BackboneConfig, BackboneSpec, ForwardFlops
from nestrec.models.sequence import WHOLE, CachedForward

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
"""The config of some backbone."""


def backbone_of(cfg: BackboneConfig) -> BackboneSpec:
    """What the backbone of a config says of itself."""
    return BACKBONES.find(cfg.kind, field="encoder.kind")


def make_encoder(cfg: BackboneConfig) -> nn.Module:
    """(T, D) input vectors and a `SequenceInfo` to (T, D) states."""
    return backbone_of(cfg).build(cfg)


def reads_times(cfg: BackboneConfig) -> bool:
    """Whether a model of this config reads when events happened."""
    return backbone_of(cfg).reads_times(cfg)


def flops_of(cfg: BackboneConfig) -> ForwardFlops:
    """Operations of the layers, forward; a UserError where the backbone does not tell them."""
    if (flops := backbone_of(cfg).flops) is None:
        raise BACKBONES.unanswered(cfg.kind, "flops", "its floating-point operations are not known")
    return flops(cfg)


def activations_of(cfg: BackboneConfig) -> float:
    """Numbers a token that training keeps; a UserError where the backbone does not tell them."""
    if (activations := backbone_of(cfg).activations) is None:
        raise BACKBONES.unanswered(cfg.kind, "activations", "what it keeps from forward to backward is not known")
    return activations(cfg)


def cached_forward_of(cfg: BackboneConfig) -> CachedForward:
    """How serving computes this model: against kept prefixes, or whole where its backbone does not say how."""
    cached = backbone_of(cfg).cached
    if isinstance(cached, str):
        cached = CACHED_FORWARDS.get(cached, cached)
    return WHOLE if cached is None else BACKBONES.resolved(cfg.kind, "cached", cached, of=CachedForward)
