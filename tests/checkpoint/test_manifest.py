# SPDX-License-Identifier: Apache-2.0
"""Manifests: what is wrong with a folder is found, and a crafted manifest does no harm."""

import errno
import os
import re
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
from damages import flip
from hypothesis import given
from hypothesis import strategies as st

from zero8 import cli
from zero8.files import atomic, tags
from zero8.files.manifest import MANIFEST, MARKER, File, Manifest
from zero8.files.tags import seal

CONTENTS = {"model.pt": b"m" * 1000, "deep/er/rank0.pt": b"0" * 77, "deep/er/rank1.pt": b"1" * 77}


@pytest.fixture
def folder(tmp_path):
    """A folder of files, sealed."""
    tag = tmp_path / "tag"
    for name, data in CONTENTS.items():
        (tag / name).parent.mkdir(parents=True, exist_ok=True)
        (tag / name).write_bytes(data)
    seal(tag)
    return tag


def reasons(folder):
    return {damage.path: damage.reason for damage in Manifest.read(folder).check(folder)}


def test_seal_syncs_every_file_and_folder_before_the_manifest_names_them(folder, monkeypatch):
    """After a loss of power a manifest must not name contents that have not reached the disk."""
    done, sync, replace = [], os.fsync, os.replace

    def fsync(descriptor):
        done.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    monkeypatch.setattr(atomic.os, "fsync", fsync)
    monkeypatch.setattr(atomic.os, "replace", lambda a, b: (done.append("named"), replace(a, b)))
    seal(folder)
    before, after = done[: done.index("named")], done[done.index("named") :]
    assert {str(folder / name) for name in CONTENTS} < set(before)
    assert {str(folder), str(folder / "deep/er")} < set(before)
    assert str(folder) in after


DAMAGES = {
    "flipped": (flip, "contents differ"),
    "cut": (lambda path: os.truncate(path, 5), "truncated: got 5 bytes, expected 77"),
    "longer": (lambda path: path.write_bytes(bytes(90)), "too long: got 90 bytes, expected 77"),
    "missing": (os.remove, "missing"),
    "of another rank": (
        lambda path: path.write_bytes(CONTENTS["deep/er/rank0.pt"]),
        "contents differ: they are those of deep/er/rank0.pt of rank 0",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_check_of_a_damaged_file_says_what_is_wrong(folder, name):
    damage, reason = DAMAGES[name]
    damage(folder / "deep/er/rank1.pt")
    found = reasons(folder)
    assert list(found) == ["deep/er/rank1.pt"]
    assert found["deep/er/rank1.pt"].startswith(reason)


def test_check_of_a_file_too_many_says_so_if_it_is_a_part(folder):
    (folder / "deep" / "extra.pt").write_bytes(b"")
    (folder / "notes.txt").write_bytes(b"")
    manifest = Manifest.read(folder)
    of_pt = manifest.check(folder, is_part=lambda path: path.endswith(".pt"))
    assert [(damage.path, damage.rank) for damage in of_pt] == [("deep/extra.pt", None)]
    assert sorted(reasons(folder)) == ["deep/extra.pt", "notes.txt"]
    assert "not in the manifest" in str(of_pt[0])


def test_check_passes_over_what_is_left_of_an_interrupted_write(folder):
    (folder / f".{MANIFEST}{atomic.TEMPORARY}").write_bytes(b"half")
    (folder / MARKER).write_bytes(b"")
    assert reasons(folder) == {}


def test_check_by_shares_finds_each_damage_once(folder):
    flip(folder / "model.pt")
    os.remove(folder / "deep/er/rank0.pt")
    (folder / "extra").write_bytes(b"")
    manifest = Manifest.read(folder)
    found = [d.path for i in range(3) for d in manifest.check(folder, (i, 3))]
    assert sorted(found) == ["deep/er/rank0.pt", "extra", "model.pt"]


# --- Manifests that say anything -----------------------------------------------------------------


FILE = File("a", 1, "0" * 32, 0)


def crafted(*files, world_size=2):
    """Return the text of a manifest of anything, with a hash that fits it."""
    return Manifest(3, world_size, files or (FILE,)).text()


BAD = {
    "empty": "",
    "not JSON": "{",
    "a newer format": crafted().replace('"format": 1', '"format": 2'),
    "world_size -1": crafted(world_size=-1),
    "absolute path": crafted(FILE._replace(path="/etc/passwd")),
    "parent": crafted(FILE._replace(path="../a")),
    "newline": crafted(FILE._replace(path="a\nb")),
    "itself": crafted(FILE._replace(path=MANIFEST)),
    "size -1": crafted(FILE._replace(size_bytes=-1)),
    "rank 2 of 2": crafted(FILE._replace(rank=2)),
    "twice": crafted(FILE, FILE),
    "wrong hash": crafted()[:-6] + "0" + crafted()[-5:],
}


@pytest.mark.parametrize("name", BAD)
def test_manifest_that_is_bad_is_a_valueerror(tmp_path, name):
    (tmp_path / MANIFEST).write_text(BAD[name])
    with pytest.raises(ValueError) as caught:
        Manifest.read(tmp_path)
    assert str(tmp_path / MANIFEST) in str(caught.value) and len(str(caught.value)) < 1000


@given(st.data())
def test_manifest_with_any_flipped_bit_is_a_valueerror(data):
    text = bytearray(crafted().encode())
    assert Manifest.parsed(bytes(text)).files == (FILE,)
    text[data.draw(st.integers(0, len(text) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ValueError):
        Manifest.parsed(bytes(text))


# --- Files ---------------------------------------------------------------------------------------


def test_write_atomically_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "latest"
    atomic.write_atomically(path, b"old")

    monkeypatch.setattr(atomic.os, "fsync", Mock(side_effect=OSError(28, "No space left")))
    with pytest.raises(OSError, match="No space left: .*latest"):
        atomic.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_folder_that_is_not_synced_is_an_error_unless_its_file_system_cannot(
    tmp_path, monkeypatch, number
):
    monkeypatch.setattr(atomic.os, "fsync", Mock(side_effect=OSError(number, "")))
    with nullcontext() if number == errno.EINVAL else pytest.raises(OSError):
        atomic.sync_folder(tmp_path)


def test_lock_that_another_holds_is_refused_with_its_name_and_free_afterwards(tmp_path):
    with tags.locked(tmp_path):
        with pytest.raises(BlockingIOError, match=f"process {os.getpid()} on .*folder of its own"):
            with tags.locked(tmp_path):
                pass
        assert cli.main(["checkpoint", "prune", str(tmp_path), "--keep", "1"]) == 2
    with tags.locked(tmp_path):
        pass


@pytest.mark.parametrize("number", [errno.ENOLCK, 524, errno.EIO])
def test_lock_on_a_file_system_without_locks_lets_the_block_run(
    tmp_path, monkeypatch, caplog, number
):
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(number, os.strerror(number))))
    runs, problem = number != errno.EIO, f"{os.strerror(number)}.*{tmp_path}/.zero8_lock"
    for _ in range(2):
        with nullcontext() if runs else pytest.raises(OSError, match=problem):
            with tags.locked(tmp_path):
                pass
    assert [bool(re.search(problem, line)) for line in caplog.messages] == [True] * runs
