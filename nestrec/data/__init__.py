"""Datasets on disk: schema, preparation from logs, reading, order, batches, synthetic logs."""

from nestrec.data.card import Card
from nestrec.data.dataset import Dataset, Rows

__all__ = ["Card", "Dataset", "Rows"]
