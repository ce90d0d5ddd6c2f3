"""Folders that exist completely or not at all."""

import dataclasses
import re

import pytest
from safetensors.numpy import load_file

from realsys.cluster import commit_folder
from realsys.cluster.commit_folder import FolderFormat, FolderManifest, Removed, checksum_of
from realsys.cluster.files import FileInfo, TensorEntry, write_safetensors
from realsys.errors import CheckpointError, Fenced


class Notes(FolderManifest, frozen=True):
    author: str


NOTES = FolderFormat(
    kind="note",
    manifest="notes.json",
    contents=Notes,
    number=3,
    pattern=re.compile(r"n\d+"),
    error=CheckpointError,
    advice="write it again",
)


def filled(root, name, content=b"content"):
    """A folder that is ready to be committed."""
    tmp = NOTES.prepare(root / f"{name}.tmp")
    (tmp / "a.bin").write_bytes(content)
    return tmp, Notes("me", files={"a.bin": FileInfo(len(content), checksum_of(content))})


def committed(root, name):
    tmp, notes = filled(root, name)
    return NOTES.commit(tmp, root / name, notes)


def test_committed_folder_is_complete_and_verified(tmp_path):
    folder = committed(tmp_path, "n1")
    assert NOTES.complete(tmp_path) == [folder] and NOTES.unfinished(tmp_path) == []
    assert NOTES.verify(folder) == NOTES.read(folder) and NOTES.read(folder).author == "me"


def test_lost_lease_leaves_no_complete_folder(tmp_path):
    """The lease is checked before the manifest and again before the rename."""
    for checks in (0, 1):
        tmp, notes = filled(tmp_path, "n1")
        left = iter([None] * checks)

        def check_alive(left=left):  # type: ignore[no-untyped-def]
            if next(left, Fenced) is Fenced:
                raise Fenced("lease lost")

        with pytest.raises(Fenced):
            NOTES.commit(tmp, tmp_path / "n1", notes, check_alive)
        assert (tmp / "notes.json").exists() == bool(checks)
        assert NOTES.complete(tmp_path) == [] and NOTES.unfinished(tmp_path) == [tmp]
        with pytest.raises(CheckpointError, match=r"was never completed: .*; write it again"):
            NOTES.read(tmp)


def test_folder_is_synced_before_it_is_renamed(tmp_path, monkeypatch):
    order: list[str] = []
    monkeypatch.setattr(commit_folder, "fsync_directory", lambda path: order.append(f"{path.name} {final.exists()}"))
    final = tmp_path / "n1"
    committed(tmp_path, "n1")
    assert order == ["n1.tmp False", f"{tmp_path.name} True"]


def test_replaced_folder_leaves_nothing_behind(tmp_path):
    folder = committed(tmp_path, "n1")
    tmp, notes = filled(tmp_path, "n1", b"other")
    with pytest.raises(CheckpointError, match="exists already: a note is written once"):
        NOTES.commit(tmp, folder, notes)
    NOTES.commit(tmp, folder, notes, replace=True)
    assert list(tmp_path.iterdir()) == [folder] and (folder / "a.bin").read_bytes() == b"other"
    NOTES.verify(folder)


@pytest.mark.parametrize("damage", [b"contenu", b"conten", None])
def test_damaged_file_is_named_with_advice(tmp_path, damage):
    path = committed(tmp_path, "n1") / "a.bin"
    path.unlink() if damage is None else path.write_bytes(damage)
    with pytest.raises(CheckpointError, match=rf"{path} .*; write it again"):
        NOTES.verify(path.parent)


def test_every_flipped_bit_of_a_manifest_is_noticed(tmp_path):
    path = committed(tmp_path, "n1") / "notes.json"
    whole = path.read_bytes()
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(CheckpointError, match=r"notes\.json (is corrupt|has format)"):
            NOTES.read(path.parent)


NEWER = dataclasses.replace(NOTES, number=4).encode(Notes("me"))
OUTSIDE = NOTES.encode(Notes("me", files={"../x": FileInfo(1, "")}))


@pytest.mark.parametrize(
    ("manifest", "problem"),
    [
        (NEWER, "has format 4, this realsys reads format 3: write it again"),
        (b'{"author": "me"}', "is corrupt or has an older format, this realsys reads format 3"),
        (OUTSIDE, "names a file outside its folder"),
    ],
)
def test_other_manifest_is_refused(tmp_path, manifest, problem):
    folder = committed(tmp_path, "n1")
    (folder / "notes.json").write_bytes(manifest)
    with pytest.raises(CheckpointError, match=problem):
        NOTES.read(folder)


def test_removal_starts_with_the_manifest(tmp_path, monkeypatch):
    """A removal that fails leaves an unfinished folder, and is a problem of the result."""
    first, second = committed(tmp_path, "n1"), committed(tmp_path, "n2")

    def busy(path):
        raise OSError(39, "Directory not empty", str(path))

    monkeypatch.setattr(commit_folder.shutil, "rmtree", busy)
    removed = NOTES.remove([first])
    assert removed.gone == [] and "cannot be removed now: Directory not empty" in removed.problems[str(first)]
    assert NOTES.complete(tmp_path) == [second] and NOTES.unfinished(tmp_path) == [first]
    monkeypatch.undo()
    assert NOTES.remove(NOTES.unfinished(tmp_path)) == Removed([str(first)])


def test_folder_set_aside_is_not_found(tmp_path):
    aside = NOTES.set_aside(committed(tmp_path, "n1"))
    assert NOTES.complete(tmp_path) == [] and NOTES.unfinished(tmp_path) == [aside]


def test_safetensors_file_begins_tensors_where_it_says(tmp_path):
    path, contents = tmp_path / "x.safetensors", [bytes(range(16)), b"", b"\x01\x02"]
    entries = [TensorEntry("f", "F32", [2, 2], 16), TensorEntry("none", "U8", [0], 0), TensorEntry("u", "U8", [2], 2)]
    info, starts = write_safetensors(path, entries, map(memoryview, contents))
    written = path.read_bytes()
    assert info == FileInfo(len(written), checksum_of(written)) and starts[0] % 8 == 0
    for start, content in zip(starts, contents, strict=True):
        assert written[start : start + len(content)] == content
    assert {name: tensor.tobytes() for name, tensor in load_file(path).items()} == dict(
        zip(["f", "none", "u"], contents, strict=True)
    )
