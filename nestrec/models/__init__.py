"""Models (backbones, heads, DLRM). They take looked-up embeddings as input and do not depend on tables or ranks."""

from nestrec.models.dlrm import DLRM, DLRMConfig
from nestrec.models.fuxi import FuXi, FuXiConfig
from nestrec.models.hstu import HSTU, HSTUConfig
from nestrec.models.sasrec import SASRec, SASRecConfig
from nestrec.models.sequence import SequenceInfo

__all__ = ["DLRM", "HSTU", "DLRMConfig", "FuXi", "FuXiConfig", "HSTUConfig", "SASRec", "SASRecConfig", "SequenceInfo"]
