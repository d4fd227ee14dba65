"""Random corruption of a checkpoint is always detected, and the previous valid step is loaded."""

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

NUM_CORRUPTIONS_EACH = 30
WORLD = 3
Corruption = Callable[[Path, random.Random], None]


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
    index = random_.randrange(len(content) + 1)
    file.write_bytes(content[:index] + random_.randbytes(1) + content[index:])


def swap_shards(folder: Path, random_: random.Random) -> None:
    """Swap the contents of two files of equal size, so that only digests per file name detect it."""
    first, second = random_.sample(sorted(folder.glob("rows-items-*")), 2)
    first_bytes = first.read_bytes()
    second_bytes = second.read_bytes()
    assert len(first_bytes) == len(second_bytes)
    assert first_bytes != second_bytes
    first.write_bytes(second_bytes)
    second.write_bytes(first_bytes)


def copy_from_previous_step(folder: Path, random_: random.Random) -> None:
    file = any_file(folder, random_)
    shutil.copyfile(folder.with_name("step-00000001") / file.name, file)


def edit_manifest(folder: Path, random_: random.Random) -> None:
    """Replace a value of the manifest, and write it in its usual formatting."""
    path = folder / "manifest.json"
    plain = json.loads(path.read_bytes())
    entries: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            entries.append((node, key))
            if isinstance(value, dict | list):
                walk(value)

    walk(plain)
    node, key = random_.choice(entries)
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


CORRUPTIONS: list[Corruption] = [
    flip_bit,
    truncate,
    remove,
    empty,
    add_byte,
    swap_shards,
    copy_from_previous_step,
    edit_manifest,
    reformat_manifest,
    replace_by_folder,
]


def content_of(peers: CheckpointGroup, step: int) -> RankCheckpoint:
    rows = [make_rows(range(peers.rank * 100 + part * 6, peers.rank * 100 + part * 6 + 6), step) for part in range(2)]
    content = make_content(step)
    return RankCheckpoint(tensors=content.tensors, state=content.state, tables={"items": rows, "empty": []})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with checkpoints of steps 1 and 2, written by several ranks."""
    folder = tmp_path_factory.mktemp("saved")

    def save(peers: CheckpointGroup) -> None:
        checkpoints = CheckpointManager(folder, peers=peers)
        for step in (1, 2):
            checkpoints.save(step, content_of(peers, step))

    assert run_ranks(WORLD, save) == [None] * WORLD
    return folder


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda corrupt: corrupt.__name__)
def test_checkpoint_corruption_loads_previous_step(saved: Path, tmp_path: Path, corrupt: Corruption) -> None:
    all_rows = [chunk for rank in range(WORLD) for chunk in content_of(CheckpointGroup(rank=rank), 1).tables["items"]]
    for seed in range(NUM_CORRUPTIONS_EACH):
        folder = tmp_path / str(seed)
        shutil.copytree(saved, folder)
        corrupt(folder / "step-00000002", random.Random(seed))
        assert verify(folder / "step-00000002") != []
        messages: list[str] = []
        restored = CheckpointManager(folder, report=messages.append).restore_latest()
        assert restored is not None
        assert restored.step == 1
        assert restored.state == make_content(1).state
        assert torch.equal(restored.tensors["model/weight"], make_content(1).tensors["model/weight"])
        assert values_of(restored, "items") == table_values(all_rows)
        assert len(messages) == 1
        assert "step 2" in messages[0]
        shutil.rmtree(folder)


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda corrupt: corrupt.__name__)
def test_checkpoint_mirror_corruption_keeps_all_files(saved: Path, tmp_path: Path, corrupt: Corruption) -> None:
    """If one of two checkpoints is corrupt, the other is restored; if both are corrupt, both are retained."""
    for seed in range(NUM_CORRUPTIONS_EACH // 5):
        mirror = tmp_path / f"{seed}-mirror"
        folder = tmp_path / str(seed)
        draw = random.Random(seed)
        shutil.copytree(saved, mirror)
        corrupt(mirror / "step-00000002", draw)
        restored = CheckpointManager(folder, address=str(mirror), report=lambda message: None).restore_latest()
        assert restored is not None
        assert restored.step == 1
        shutil.rmtree(folder)
        if corrupt is copy_from_previous_step:  # the oldest step does not have a previous one
            continue
        corrupt(mirror / "step-00000001", draw)
        before = sorted(str(path) for path in mirror.rglob("*"))
        with pytest.raises(CorruptFileError, match="all checkpoints in the mirror are corrupt"):
            CheckpointManager(folder, address=str(mirror), report=lambda message: None).restore_latest()
        assert sorted(str(path) for path in mirror.rglob("*")) == before
        assert not list(folder.glob("*"))


def test_checkpoint_copy_without_corruption_loads(saved: Path, tmp_path: Path) -> None:
    """Check that the tests above detect the corruption and not the copying."""
    shutil.copytree(saved, tmp_path / "copy")
    restored = CheckpointManager(tmp_path / "copy").restore_latest()
    assert restored is not None
    assert restored.step == 2
