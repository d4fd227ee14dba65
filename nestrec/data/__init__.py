"""Datasets on disk: schema, preparation from logs, reading, order, batches, synthetic logs."""

from nestrec.data.dataset import Dataset, DatasetRows
from nestrec.data.dataset_card import DatasetCard

__all__ = ["Dataset", "DatasetCard", "DatasetRows"]
