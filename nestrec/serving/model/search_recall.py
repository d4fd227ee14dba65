"""A search that does not look at every row, built over an index and measured on users of the dataset."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from nestrec.base.errors import UserError
from nestrec.data.dataset import Dataset
from nestrec.serving.engine.user_queries import user_queries
from nestrec.serving.model.faiss_search import FaissSearch, built, measured_recall
from nestrec.serving.model.forms import make_form
from nestrec.serving.model.retrieval_form import RetrievalForm
from nestrec.serving.model.search_options import SearchConfig
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.tables import ResidentTable
from nestrec.serving.users.dataset_users import DatasetUsers

_NUM_USERS = 200


@torch.inference_mode()
def with_search(servable: Servable, cfg: SearchConfig, data: Path) -> Servable:
    """The model with what a search needs and the recall of it. data: the dataset that users are taken from."""
    index = servable.index
    if not isinstance(index, ResidentTable):
        remedy = "leave it exact"
        raise UserError(
            "is for retrieval models, which have an index", field="search.kind", value=cfg.kind, remedy=remedy
        )
    tensors = built(index.weight, cfg)
    dataset = Dataset.open(data)
    places = np.unique(np.linspace(0, dataset.num_samples - 1, _NUM_USERS).astype(np.int64))
    users = DatasetUsers(dataset, servable, context=None).read(places)
    form = make_form(servable)
    assert isinstance(form, RetrievalForm)
    asked = [(user.history, user.now_ms) for user in users.users(0, len(users)) if len(user.seen)]
    queries = user_queries(form, asked)
    recall = measured_recall(FaissSearch(index.weight, cfg, tensors), index.weight, queries, "users of the dataset")
    return replace(servable, search=tensors, spec=replace(servable.spec, search=cfg, recall=recall))
