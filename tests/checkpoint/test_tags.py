# SPDX-License-Identifier: Apache-2.0
"""Tags of a folder: complete or not, in an order without clocks; saved, pruned and interrupted."""

import os
from contextlib import suppress

import pytest
from fault_worker import Counter, Interrupted, killed_at

from zero8.files import tags
from zero8.files.manifest import MANIFEST, MARKER, Manifest
from zero8.files.tags import COMPLETE, DAMAGED, INCOMPLETE, UNVERIFIED, file_entry, verify


def begin(folder, tag):
    tags.begin(folder / tag, tags.next_sequence(folder), "note")


def save(folder, tag, data=b"data"):
    """Save a tag as a job does."""
    sequence = tags.next_sequence(folder)
    tags.begin(folder / tag, sequence)
    (folder / tag / "deep").mkdir(exist_ok=True)
    (folder / tag / "deep" / "states.pt").write_bytes(data)
    entry = file_entry(folder / tag, "deep/states.pt", 0)
    tags.end(folder / tag, Manifest.of(sequence, 1, [entry]))
    tags.write_latest(folder, tag)


def states(folder):
    return {tag.name: tag.state for tag in tags.tags_in(folder)}


def complete(folder):
    return [tag.name for tag in tags.complete_tags(folder)]


def test_tag_is_complete_when_it_has_ended_and_not_before(tmp_path):
    begin(tmp_path, "a")
    (tmp_path / "a" / "states.pt").write_bytes(b"half")
    assert states(tmp_path) == {"a": INCOMPLETE}
    assert tags.note_of(tmp_path / "a") == "note"
    save(tmp_path, "a")
    assert states(tmp_path) == {"a": COMPLETE}
    assert not (tmp_path / "a" / MARKER).exists()
    verify(tmp_path / "a")


def test_tag_that_was_interrupted_is_cleared_by_the_next_save_of_it_but_for_others_files(tmp_path):
    begin(tmp_path, "a")
    (tmp_path / "a" / "offloaded").mkdir()
    (tmp_path / "a" / "offloaded" / "stale").write_bytes(b"")
    (tmp_path / "a" / "notes.txt").write_bytes(b"mine")
    tags.begin(tmp_path / "a", 5, is_part=lambda path: path.startswith("offloaded/"))
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["notes.txt", MARKER]


def test_tag_of_another_program_is_unverified_and_keeps_its_files(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "mp_rank_00_model_states.pt").write_bytes(b"theirs")
    assert states(tmp_path) == {"a": UNVERIFIED}
    begin(tmp_path, "a")
    assert (tmp_path / "a" / "mp_rank_00_model_states.pt").exists()


@pytest.mark.parametrize("manifest", [b"", b"{}", b"\xff", None])
def test_tag_with_a_manifest_that_cannot_be_read_is_damaged_and_says_why(tmp_path, manifest):
    save(tmp_path, "a")
    (tmp_path / "a" / MANIFEST).unlink()
    if manifest is None:
        (tmp_path / "a" / MANIFEST).mkdir()
    else:
        (tmp_path / "a" / MANIFEST).write_bytes(manifest)
    (tag,) = tags.tags_in(tmp_path)
    assert tag.state == DAMAGED and MANIFEST in tag.problem


@pytest.mark.parametrize("marker", [b"", b"[]", b"{", b'{"sequence": "x"}', b"x" * 5000])
def test_marker_of_anything_is_a_marker(tmp_path, marker):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / MARKER).write_bytes(marker)
    (tag,) = tags.tags_in(tmp_path)
    assert (tag.state, tag.sequence) == (INCOMPLETE, 0)


def test_order_of_tags_is_that_of_saving_whatever_the_clock_says(tmp_path):
    order = ["step10", "step9", "best", "step1"]
    for tag in order:
        save(tmp_path, tag)
    for age, tag in enumerate(order):
        for path in (tmp_path / tag / MANIFEST, tmp_path / tag):
            os.utime(path, (1e9 - 1000 * age, 1e9 - 1000 * age))
    assert complete(tmp_path) == order
    save(tmp_path, "step10")
    assert complete(tmp_path) == [*order[1:], "step10"]


# --- latest --------------------------------------------------------------------------------------


def test_latest_is_what_was_written_and_none_without_a_file(tmp_path):
    assert tags.read_latest(tmp_path) is None
    assert tags.read_latest(tmp_path / "none") is None
    tags.write_latest(tmp_path, "step 7")
    assert (tmp_path / "latest").read_text() == "step 7"  # as DeepSpeed writes it
    (tmp_path / "latest").write_text("step7\n")  # as an editor does
    assert tags.read_latest(tmp_path) == "step7"


# --- prune ---------------------------------------------------------------------------------------


def test_prune_keeps_the_newest_and_what_latest_names(tmp_path):
    for tag in "abcde":
        save(tmp_path, tag)
    tags.write_latest(tmp_path, "b/in")
    assert tags.prune(tmp_path, 2) == ["a", "c"]
    assert complete(tmp_path) == ["b", "d", "e"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b", "d", "e", "latest"]


def test_prune_deletes_interrupted_tags_that_a_complete_one_follows(tmp_path):
    save(tmp_path, "a")
    begin(tmp_path, "torn")
    (tmp_path / "torn" / "states.pt").write_bytes(b"half")
    assert tags.prune(tmp_path, 3) == []  # nothing complete follows it yet
    save(tmp_path, "b")
    begin(tmp_path, "newer")
    assert tags.prune(tmp_path, 3) == ["torn"]
    assert states(tmp_path) == {"a": COMPLETE, "b": COMPLETE, "newer": INCOMPLETE}


def test_prune_never_deletes_the_last_complete_tag_or_what_it_does_not_know(tmp_path):
    save(tmp_path, "a")
    begin(tmp_path, "torn")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "model_states.pt").write_bytes(b"")
    save(tmp_path, "damaged")
    (tmp_path / "damaged" / MANIFEST).write_bytes(b"{}")
    before = states(tmp_path)
    for _ in range(2):
        assert tags.prune(tmp_path, 1) == []
    assert states(tmp_path) == before
    with pytest.raises(ValueError, match="keep: got 0"):
        tags.prune(tmp_path, 0)


def interrupted(tmp_path, function, *arguments, least):
    """Yield folders of tags in which a function was interrupted before any change of the disk."""
    for stop_after in range(100):
        folder, ended = tmp_path / str(stop_after), False
        folder.mkdir()
        for tag in "ab":
            save(folder, tag)
        with suppress(Interrupted), killed_at(Counter(stop_after, kills=False)):
            function(folder, *arguments)
            ended = True
        yield folder
        if ended:
            break
    assert ended and stop_after > least


def test_prune_that_is_interrupted_anywhere_leaves_no_seemingly_whole_tag(tmp_path):
    for folder in interrupted(tmp_path, tags.prune, 1, least=5):
        assert complete(folder)[-1] == "b"
        if (folder / "a").exists() and states(folder)["a"] != INCOMPLETE:
            # Untouched, or an empty folder, about to go.
            assert not list((folder / "a").iterdir()) or verify(folder / "a")
        tags.prune(folder, 1)
        save(folder, "c")
        tags.prune(folder, 1)
        assert complete(folder) == ["c"]


def test_save_that_is_interrupted_anywhere_is_whole_or_not_complete(tmp_path):
    for folder in interrupted(tmp_path, save, "b", b"new!", least=10):
        for tag in tags.complete_tags(folder):
            verify(folder / tag.name)
        assert states(folder)["b"] in (COMPLETE, INCOMPLETE)
        assert tags.read_latest(folder) == "b"
        save(folder, "b", b"newest")
        assert (folder / "b/deep/states.pt").read_bytes() == b"newest"
