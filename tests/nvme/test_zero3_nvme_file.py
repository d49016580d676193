# SPDX-License-Identifier: Apache-2.0
"""The file of a swapped state, and what guards its way to the disk; no ranks, no disk bypass."""

import errno
import os
import subprocess
import sys

import pytest
import torch
from damages import edited
from full_disk import file_size_limit
from moment_samples import NUMEL, moment
from nests import difference
from zero_worker import plain

from zero8.deepspeed import swap_file
from zero8.deepspeed.moment_tensor import HEADER
from zero8.deepspeed.swapper import SwapsStates
from zero8.spec.adam import ADAM
from zero8.spec.algorithms import ALGORITHMS
from zero8.spec.codec import CODECS


def state_of(codec="log", correction=False, algorithm=ADAM):
    """Return a state with 8-bit and float32 pieces."""
    state = {"step": 7}
    for number, one in enumerate(algorithm.memory, 1):
        state[one.name] = number / 4
    for seed, which in enumerate(algorithm.moment_names, 1):
        state[which] = moment(codec, which, seed, algorithm)
    if correction:
        state["param_correction"] = torch.arange(NUMEL).to(torch.int8)
    return state


def contents(state):
    return {key: plain(value) for key, value in state.items()}


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "file")


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda one: one.name)
@pytest.mark.parametrize("correction", [False, True])
@pytest.mark.parametrize("codec", CODECS)
def test_zero3_nvme_file_restores_every_bit_of_a_state(path, codec, correction, algorithm):
    state = state_of(codec, correction, algorithm)
    with open(path, "wb") as file:
        file.write(bytes(1 << 20))  # a longer one is there
    mark = swap_file.save(path, state)
    found = swap_file.load(path, mark)
    assert difference(contents(found), contents(state)) == ""
    for which in algorithm.moment_names:
        assert found[which].store.table == state[which].store.table
        assert found[which].store.codec == state[which].store.codec


def cut_to(size):
    def damage(path):
        with open(path, "r+b") as file:
            file.truncate(size if size >= 0 else file.seek(0, 2) + size)

    return damage


def overwrite(path):
    with open(path, "r+b") as file:
        file.write(b"?" * 4096)


def flip_a_code(saved):
    saved["exp_avg"]["codes"][100] ^= 1


def exchange_runs(saved):
    codes = saved["exp_avg_sq"]["codes"]
    codes[:512], codes[512:1024] = codes[512:1024].clone(), codes[:512].clone()


def flip_a_correction(saved):
    saved["param_correction"][-1] ^= 1


DAMAGES = {
    "code": (edited(flip_a_code), "exp_avg of .* the file is damaged"),
    "runs exchanged": (edited(exchange_runs), "exp_avg_sq of .* the file is damaged"),
    "correction": (edited(flip_a_correction), "its hash is wrong"),
    "step": (edited(lambda saved: saved.update(step=8)), "its hash is wrong"),
    "memory": (edited(lambda saved: saved.update(history=0.5)), "its hash is wrong"),
    "header": (edited(lambda saved: saved["exp_avg"][HEADER].update(written=False)), "its hash"),
    "version": (
        edited(lambda saved: saved["exp_avg"][HEADER].update(version=9)),
        "format version 9, this zero8 reads 1",
    ),
    "another's": (edited(lambda saved: saved.pop("hash")), "not a file of 8-bit"),
    "list": (lambda path: torch.save([1], path), "not a file of 8-bit"),
    "begin": (overwrite, "damaged or cut short"),
    **{f"cut to {size}": (cut_to(size), "damaged or cut") for size in (0, 8, 4096, -4096, -1)},
}


@pytest.mark.parametrize("name", DAMAGES)
def test_zero3_nvme_file_that_is_damaged_is_an_error_that_names_it(path, name):
    damage, message = DAMAGES[name]
    mark = swap_file.save(path, state_of(correction=True))
    damage(path)
    for expected in (None, mark):
        with pytest.raises(ValueError, match=message) as caught:
            swap_file.load(path, expected)
        assert str(caught.value).startswith(path)


def test_zero3_nvme_file_that_is_not_the_last_one_written_is_an_error_with_both_steps(path):
    old = swap_file.save(path, state_of())
    other = swap_file.save(path, state_of("dynamic") | {"step": 8})
    new = swap_file.save(path, state_of() | {"step": 8})
    assert swap_file.load(path, new)["step"] == 8
    for mark in (old, other):
        with pytest.raises(ValueError, match=f"whole, but of step 8 and not .* step {mark.step}"):
            swap_file.load(path, mark)


def test_zero3_nvme_reserve_makes_a_file_longer_and_never_shorter(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"kept")
    swap_file.reserve(str(path), 10_000)
    swap_file.reserve(str(path), 5_000)
    assert path.stat().st_size == 10_000
    assert path.stat().st_blocks * 512 >= 10_000
    assert path.read_bytes().startswith(b"kept")


@pytest.mark.parametrize("way", ["reserve", "save"])
def test_zero3_nvme_disk_without_room_is_an_error_that_names_the_file(path, way):
    ways = {
        "reserve": lambda: swap_file.reserve(path, 10_000),
        "save": lambda: swap_file.save(path, state_of()),
    }
    with file_size_limit(4096), pytest.raises(OSError, match="bytes are free") as caught:
        ways[way]()
    assert caught.value.filename == path
    assert caught.value.errno == errno.EFBIG


# --- Who may keep files in a folder: one process -------------------------------------------------

TAKE = "import sys; from zero8.deepspeed import swap_file; swap_file.lock(sys.argv[1])"
TAKE_AND_WAIT = f"{TAKE}; print('taken', flush=True); sys.stdin.read()"


@pytest.mark.timeout(120)
def test_folder_is_refused_while_another_process_has_it_and_free_when_that_is_killed(
    forks, tmp_path
):
    command = [sys.executable, "-c", TAKE_AND_WAIT, tmp_path]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as first:
        try:
            assert first.stdout.readline() == "taken\n"
            with pytest.raises(OSError, match=f"in use: process {first.pid} on .*nvme_path") as met:
                swap_file.lock(str(tmp_path))
            assert met.value.filename == str(tmp_path)
        finally:
            first.kill()
    for own in (f"{tmp_path}", f"{tmp_path.parent}/./{tmp_path.name}"):  # its own, again
        swap_file.lock(own)
    assert f"in use: process {os.getpid()} on " in forks.run(TAKE, str(tmp_path)).stderr
    assert list(tmp_path.iterdir()) == []  # DeepSpeed copies all that is in it


# --- Gradients that are cut for the disk ---------------------------------------------------------


class Swapper(SwapsStates):
    """What cutting looks at, without a disk."""

    numel_alignment, min_aio_bytes, swap_element_size = 128, 4096, 4

    def __init__(self):
        pass


def test_gradients_cut_for_the_disk_keep_no_memory_but_their_own():
    """DeepSpeed holds what is too small for a file until the step; on a GPU gradients are freed."""
    grads = [torch.randn(numel) for numel in (1000, 2**14, 2**14 + 5, 300)]
    offsets = [0, 1000, 1000 + 2**14, 1005 + 2**15]
    parts, starts = Swapper()._adjust_for_misaligned_lengths(grads, offsets)
    flat, kept_bytes = torch.full((1305 + 2**15,), torch.nan), 0
    for part, start in zip(parts, starts, strict=True):
        flat[start : start + part.numel()] = part
        if 4 * part.numel() < 4096:
            kept_bytes += part.untyped_storage().nbytes()
        else:
            assert start % 128 == part.numel() % 128 == 0
    assert torch.equal(flat, torch.cat(grads))
    # The two small gradients, and at each end of the others less than an alignment.
    assert kept_bytes <= 4 * (1000 + 300 + 4 * 128)
