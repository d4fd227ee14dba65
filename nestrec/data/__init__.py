"""Datasets on disk: schema, preparation from logs, reading, order, batches, synthetic logs."""

from nestrec.data.dataset import Dataset, Rows
from nestrec.data.dataset_card import Card

__all__ = ["Card", "Dataset", "Rows"]
