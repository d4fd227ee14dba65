"""How the index of a retrieval model is searched on a CPU, and what that finds."""

from typing import Literal

from nestrec.base.bounds import Count
from nestrec.base.config import config


@config
class SearchConfig:
    kind: Literal["exact", "faiss_hnsw", "faiss_ivf"] = "exact"
    """how the index of a retrieval model is searched on a CPU: every row, or by a graph or lists of faiss; a GPU looks
    at every row"""
    links: Count = 32
    """of a row in the graph (hnsw)"""
    build_width: Count = 80
    """rows that are looked at for the links of a new one (hnsw)"""
    width: Count = 256
    """rows that a search keeps in view (hnsw); more finds more"""
    lists: Count | None = None
    """into which rows are divided (ivf); none: four times the root of their number"""
    probes: Count = 32
    """lists that a search looks into (ivf); more finds more"""


@config
class SearchRecall:
    """What the search of an export finds of what a look at every row finds."""

    kind: str
    """faiss_hnsw or faiss_ivf"""
    recall: float
    """mean share of the k best that is found"""
    k: int
    """of the measurement"""
    queries: int
    """of the measurement"""
    of: str
    """whose queries they are"""
