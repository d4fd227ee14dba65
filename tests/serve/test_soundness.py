"""A model is looked through before it serves: files with the right digests may still hold the wrong thing."""

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
    """Write the manifest anew, so that every digest is right."""
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
    "weights that are not finite": lambda f: change_tensor(f, "weights.safetensors", with_nan),
    "a row that is not finite": lambda f: change_tensor(f, "table-items.safetensors", with_nan),
    "an index that is not finite": lambda f: change_tensor(f, "index.safetensors", with_nan),
    "fewer rows than items": lambda f: change_tensor(f, "table-items.safetensors", lambda t: t[:-1].clone()),
    "an index of other items": lambda f: change_tensor(f, "index.safetensors", lambda t: t[:-1].clone()),
    "fewer keys than items": lambda f: (f / "item_keys.json").write_text(json.dumps([str(i) for i in range(1, 20)])),
    "an item named twice": lambda f: (f / "item_keys.json").write_text(json.dumps(["1"] * 20)),
    "keys in another order": lambda f: (f / "item_keys.json").write_text(json.dumps([str(20 - i) for i in range(20)])),
    "weights of another model": lambda f: change_tensor(f, "weights.safetensors", lambda t: t.flip(0) + 1.0),
}


ONLY_THE_PROBE_TELLS = ("keys in another order", "weights of another model")


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_model_with_the_right_digests_and_the_wrong_content_never_serves(folder, damage):
    service = Service({"retrieval": random_retrieval(ENCODER, num_items=20, seed=5)}, ServiceConfig())
    before = service.fleets
    DAMAGES[damage](folder)
    if damage not in ONLY_THE_PROBE_TELLS:  # older exports have none: these are found without it
        (folder / "probe.json").unlink()
    sign(folder)
    with pytest.raises(UserError):
        service.swap(Servable.load(folder))
    assert service.fleets is before
    service.close()


def test_a_swap_takes_no_model_of_another_role(folder):
    service = Service.load([folder], ServiceConfig())
    with pytest.raises(UserError, match="ranking"):
        service.swap(random_ranking(ENCODER, num_items=20))
    assert list(service.fleets) == ["retrieval"]
    service.close()


@pytest.mark.parametrize("make", [random_retrieval, random_ranking])
def test_a_sound_model_is_taken_with_its_probe(tmp_path, make):
    write_servable(make(ENCODER, num_items=20, seed=3), tmp_path / "model")
    servable = Servable.load(tmp_path / "model")
    assert servable.probe is not None
    assert len(servable.probe.scores) == 8
    Service({"any": servable}, ServiceConfig()).close()


def test_a_model_of_an_export_without_a_probe_is_still_taken(folder):
    (folder / "probe.json").unlink()
    sign(folder)
    Service.load([folder], ServiceConfig()).close()
