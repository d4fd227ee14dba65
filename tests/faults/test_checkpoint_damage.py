"""Random damages of a checkpoint: all are detected, none crashes, and the previous good step loads."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nestrec.base.errors import CorruptFileError
from nestrec.checkpoint import CheckpointGroup, CheckpointManager, RankCheckpoint, verify
from support.checkpoint_contents import make_content, make_rows, table_values, values_of
from support.rank_pool import run_ranks

NUM_DAMAGES_EACH = 30
WORLD = 3
Damage = Callable[[Path, random.Random], None]


def any_file(folder: Path, random_: random.Random) -> Path:
    return random_.choice(sorted(folder.iterdir()))


def flip_bit(folder: Path, random_: random.Random) -> None:
    file = any_file(folder, random_)
    content = bytearray(file.read_bytes())
    content[random_.randrange(len(content))] ^= 1 << random_.randrange(8)
    file.write_bytes(content)


def truncate(folder: Path, random_: random.Random) -> None:
    file = any_file(folder, random_)
    content = file.read_bytes()
    file.write_bytes(content[: random_.randrange(len(content))])


def remove(folder: Path, random_: random.Random) -> None:
    any_file(folder, random_).unlink()


def empty(folder: Path, random_: random.Random) -> None:
    any_file(folder, random_).write_bytes(b"")


def add_byte(folder: Path, random_: random.Random) -> None:
    file = any_file(folder, random_)
    content = file.read_bytes()
    place = random_.randrange(len(content) + 1)
    file.write_bytes(content[:place] + random_.randbytes(1) + content[place:])


def swap_shards(folder: Path, random_: random.Random) -> None:
    """Two files of the same size exchange their content, so that only digests bound to names can tell."""
    first, second = random_.sample(sorted(folder.glob("rows-items-*")), 2)
    one = first.read_bytes()
    other = second.read_bytes()
    assert len(one) == len(other)
    assert one != other
    first.write_bytes(other)
    second.write_bytes(one)


def take_from_the_step_before(folder: Path, random_: random.Random) -> None:
    file = any_file(folder, random_)
    shutil.copyfile(folder.with_name("step-00000001") / file.name, file)


def edit_manifest(folder: Path, random_: random.Random) -> None:
    """Another value somewhere in the manifest, written in its own style."""
    path = folder / "manifest.json"
    plain = json.loads(path.read_bytes())
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            places.append((node, key))
            if isinstance(value, dict | list):
                walk(value)

    walk(plain)
    node, key = random_.choice(places)
    before = node[key]
    node[key] = random_.choice([value for value in (None, 0, -1, 7, "x", [], {}, True, 1e9) if value != before])
    path.write_text(json.dumps(plain, sort_keys=True, indent=1))


def reformat_manifest(folder: Path, random_: random.Random) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()), indent=random_.choice([None, 2, 3, 4])))


def replace_by_folder(folder: Path, random_: random.Random) -> None:
    file = any_file(folder, random_)
    file.unlink()
    file.mkdir()


DAMAGES: list[Damage] = [
    flip_bit,
    truncate,
    remove,
    empty,
    add_byte,
    swap_shards,
    take_from_the_step_before,
    edit_manifest,
    reformat_manifest,
    replace_by_folder,
]


def content_of(peers: CheckpointGroup, step: int) -> RankCheckpoint:
    rows = [make_rows(range(peers.rank * 100 + part * 6, peers.rank * 100 + part * 6 + 6), step) for part in range(2)]
    whole = make_content(step)
    return RankCheckpoint(tensors=whole.tensors, state=whole.state, tables={"items": rows, "empty": []})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2, written by several ranks."""
    folder = tmp_path_factory.mktemp("saved")

    def save(peers: CheckpointGroup) -> None:
        checkpoints = CheckpointManager(folder, peers=peers)
        for step in (1, 2):
            checkpoints.save(step, content_of(peers, step))

    assert run_ranks(WORLD, save) == [None] * WORLD
    return folder


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_random_damage_is_detected_and_the_step_before_loads(saved: Path, tmp_path: Path, damage: Damage) -> None:
    everything = [chunk for rank in range(WORLD) for chunk in content_of(CheckpointGroup(rank=rank), 1).tables["items"]]
    for seed in range(NUM_DAMAGES_EACH):
        folder = tmp_path / str(seed)
        shutil.copytree(saved, folder)
        damage(folder / "step-00000002", random.Random(seed))
        assert verify(folder / "step-00000002") != []
        messages: list[str] = []
        restored = CheckpointManager(folder, report=messages.append).restore_latest()
        assert restored is not None
        assert restored.step == 1
        assert restored.state == make_content(1).state
        assert torch.equal(restored.tensors["model/weight"], make_content(1).tensors["model/weight"])
        assert values_of(restored, "items") == table_values(everything)
        assert len(messages) == 1
        assert "step 2" in messages[0]
        shutil.rmtree(folder)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damaged_copies_are_never_taken_for_an_empty_address(saved: Path, tmp_path: Path, damage: Damage) -> None:
    """One of two copies is damaged: the other one is restored. Both are damaged: nothing is, and both are kept."""
    for seed in range(NUM_DAMAGES_EACH // 5):
        there = tmp_path / f"{seed}-there"
        folder = tmp_path / str(seed)
        draw = random.Random(seed)
        shutil.copytree(saved, there)
        damage(there / "step-00000002", draw)
        restored = CheckpointManager(folder, address=str(there), report=lambda message: None).restore_latest()
        assert restored is not None
        assert restored.step == 1
        shutil.rmtree(folder)
        if damage is take_from_the_step_before:  # the oldest step has none before it
            continue
        damage(there / "step-00000001", draw)
        before = sorted(str(path) for path in there.rglob("*"))
        with pytest.raises(CorruptFileError, match="none of the checkpoints there is whole"):
            CheckpointManager(folder, address=str(there), report=lambda message: None).restore_latest()
        assert sorted(str(path) for path in there.rglob("*")) == before
        assert not list(folder.glob("*"))


def test_undamaged_copies_pass(saved: Path, tmp_path: Path) -> None:
    """The other side of the test above: it is the damage that is detected, not the copying."""
    shutil.copytree(saved, tmp_path / "copy")
    restored = CheckpointManager(tmp_path / "copy").restore_latest()
    assert restored is not None
    assert restored.step == 2
