"""Content checks of a model before it serves: files with valid digests may still have wrong content."""

import json
from hashlib import sha256

import pytest
import torch
from safetensors.torch import load_file, save_file

from nestrec.base.errors import UserError
from nestrec.exporters.servable_writer import write_servable
from nestrec.models.hstu import HSTUConfig
from nestrec.serving.model.servable import Servable
from nestrec.serving.service.inference_service import Service, ServiceConfig
from nestrec_bench.harness.random_model import random_ranking, random_retrieval

ENCODER = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=16, time_bias=True)


@pytest.fixture
def folder(tmp_path):
    write_servable(random_retrieval(ENCODER, num_items=20), tmp_path / "model")
    return tmp_path / "model"


def sign(folder):
    """Update the manifest so that all digests are valid."""
    files = [path for path in sorted(folder.iterdir()) if path.name != "manifest.json"]
    entries = [{"name": p.name, "bytes": p.stat().st_size, "sha256": sha256(p.read_bytes()).hexdigest()} for p in files]
    plain = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**plain, "files": entries}))


def change_tensor(folder, file, change):
    tensors = load_file(folder / file)
    name = next(name for name, tensor in tensors.items() if tensor.is_floating_point())
    tensors[name] = change(tensors[name])
    save_file(tensors, folder / file)


def with_nan(tensor):
    tensor = tensor.clone()
    tensor.view(-1)[-1] = torch.nan
    return tensor


DAMAGES = {
    "non-finite weights": lambda f: change_tensor(f, "weights.safetensors", with_nan),
    "non-finite row": lambda f: change_tensor(f, "table-items.safetensors", with_nan),
    "non-finite index": lambda f: change_tensor(f, "index.safetensors", with_nan),
    "fewer rows than items": lambda f: change_tensor(f, "table-items.safetensors", lambda t: t[:-1].clone()),
    "fewer index rows than items": lambda f: change_tensor(f, "index.safetensors", lambda t: t[:-1].clone()),
    "fewer keys than items": lambda f: (f / "item_keys.json").write_text(json.dumps([str(i) for i in range(1, 20)])),
    "duplicate keys": lambda f: (f / "item_keys.json").write_text(json.dumps(["1"] * 20)),
    "reordered keys": lambda f: (f / "item_keys.json").write_text(json.dumps([str(20 - i) for i in range(20)])),
    "weights of another model": lambda f: change_tensor(f, "weights.safetensors", lambda t: t.flip(0) + 1.0),
}


GOLDEN_REQUEST_NEEDED = ("reordered keys", "weights of another model")


@pytest.mark.parametrize("damage", DAMAGES)
def test_soundness_rejects_wrong_content(folder, damage):
    service = Service({"retrieval": random_retrieval(ENCODER, num_items=20, seed=5)}, ServiceConfig())
    before = service.deployments
    DAMAGES[damage](folder)
    if (
        damage not in GOLDEN_REQUEST_NEEDED
    ):  # older exports have no golden request; these damages are detected without it
        (folder / "probe.json").unlink()
    sign(folder)
    with pytest.raises(UserError):
        service.swap(Servable.load(folder))
    assert service.deployments is before
    service.close()


def test_swap_rejects_model_of_other_role(folder):
    service = Service.load([folder], ServiceConfig())
    with pytest.raises(UserError, match="ranking"):
        service.swap(random_ranking(ENCODER, num_items=20))
    assert list(service.deployments) == ["retrieval"]
    service.close()


@pytest.mark.parametrize("make", [random_retrieval, random_ranking])
def test_soundness_accepts_golden_request(tmp_path, make):
    write_servable(make(ENCODER, num_items=20, seed=3), tmp_path / "model")
    servable = Servable.load(tmp_path / "model")
    assert servable.golden_request is not None
    assert len(servable.golden_request.scores) == 8
    Service({"any": servable}, ServiceConfig()).close()


def test_soundness_accepts_export_without_golden_request(folder):
    (folder / "probe.json").unlink()
    sign(folder)
    Service.load([folder], ServiceConfig()).close()
