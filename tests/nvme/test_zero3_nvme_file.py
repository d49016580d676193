# SPDX-License-Identifier: Apache-2.0
"""The file of a swapped state, and what guards its way to the disk; no ranks, no disk bypass."""

import errno
import os
import resource
import struct
import weakref

import numpy as np
import pytest
import torch
from moment_samples import MOMENTS, NUMEL, moment
from nests import difference
from zero_worker import plain

from zero8.deepspeed import swap_file, swap_io
from zero8.deepspeed.moment_tensor import MomentTensor
from zero8.deepspeed.swap_file import BLOCK_BYTES, HEADER_BYTES, Layout
from zero8.deepspeed.swap_io import Buffer, BufferPool, CheckedHandle
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


def packed(state):
    """Return the bytes of the state's file in a tensor."""
    layout = Layout.of_state(state)
    # Room for leftovers: what a buffer held before is in the gaps between tensors.
    buffer = torch.full((layout.file_bytes(BLOCK_BYTES),), 77, dtype=torch.uint8)
    swap_file.pack(state, layout, buffer)
    return buffer


def written(path, buffer):
    path.write_bytes(bytes(buffer.numpy()))
    return str(path)


def contents(state):
    return {key: plain(value) for key, value in state.items()}


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda one: one.name)
@pytest.mark.parametrize("correction", [False, True])
@pytest.mark.parametrize("codec", CODECS)
def test_zero3_nvme_file_restores_every_bit_of_a_state(tmp_path, codec, correction, algorithm):
    state = state_of(codec, correction, algorithm)
    path = written(tmp_path / "file", packed(state))
    found, layout = swap_file.read_whole(path)
    assert difference(contents(found), contents(state)) == ""
    assert layout == Layout.of_state(state) == Layout.of_state(found)
    for which in algorithm.moment_names:
        assert found[which].store.table == state[which].store.table
        assert found[which].store.codec == state[which].store.codec


def test_zero3_nvme_file_unpacked_shares_its_buffer_and_packs_without_a_copy():
    buffer = packed(state_of())
    state, layout = swap_file.unpack(buffer, "file")
    begin, end = buffer.data_ptr(), buffer.data_ptr() + buffer.numel()
    for which in MOMENTS:
        store = state[which].store
        assert all(begin <= t.data_ptr() < end for t in (store.codes, store.scales))
        store.codes.fill_(3)
    state["step"] = 8
    swap_file.pack(state, layout, buffer)
    again, same = swap_file.unpack(buffer, "file", layout)
    assert same is layout
    assert again["step"] == 8
    assert all((again[which].store.codes == 3).all() for which in MOMENTS)


def test_zero3_nvme_file_that_is_empty_has_no_state(tmp_path):
    path = str(tmp_path / "file")
    written(tmp_path / "file", packed(state_of()))
    swap_file.write_empty(path, 2 * BLOCK_BYTES)
    assert os.stat(path).st_size == 2 * BLOCK_BYTES
    assert swap_file.read_whole(path) is None


def flip(position):
    def damage(buffer):
        buffer[position] ^= 1

    return damage


def set_version(buffer, version=swap_file.FORMAT_VERSION + 1):
    buffer[16:20] = torch.frombuffer(bytearray(struct.pack("<I", version)), dtype=torch.uint8)


def exchange(count, first=HEADER_BYTES + 3000):
    """Exchange two neighbouring runs of so many bytes, which a sum would not see."""

    def damage(buffer):
        one, other = buffer[first:][:count].clone(), buffer[first + count :][:count].clone()
        assert not torch.equal(one, other)
        buffer[first:][:count], buffer[first + count :][:count] = other, one

    return damage


def compensate(buffer):
    """Add 1 to one 64-bit word and subtract it from another."""
    words = buffer.view(torch.int64)
    words[500] += 1
    words[501] -= 1


DAMAGES = {
    "magic": (flip(0), "not a file of 8-bit optimizer states"),
    "checksum": (flip(8), "checksum is wrong"),
    "version": (set_version, "format version 2, this zero8 reads 1"),
    "runs exchanged": (exchange(512), "checksum is wrong"),
    "words that compensate": (compensate, "checksum is wrong"),
    "step": (flip(24), "checksum is wrong"),
    "end of the tensors": (flip(33), "cut short"),
    "memory of other algorithms": (flip(48), "checksum is wrong"),
    "description": (flip(HEADER_BYTES), "description is damaged"),
    "first code": (flip(HEADER_BYTES + 4000), "checksum is wrong"),
    "last byte": (flip(-1), "checksum is wrong"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_zero3_nvme_file_with_a_wrong_bit_is_an_error_that_names_it(tmp_path, name):
    damage, message = DAMAGES[name]
    buffer = packed(state_of())
    damage(buffer)
    path = written(tmp_path / "file", buffer)
    with pytest.raises(ValueError, match=message) as caught:
        swap_file.read_whole(path)
    assert str(caught.value).startswith(path)


def test_zero3_nvme_file_that_is_not_the_last_one_written_is_an_error_with_both_steps(tmp_path):
    state = state_of()
    layout = Layout.of_state(state)
    old, new = (torch.zeros(layout.file_bytes(BLOCK_BYTES), dtype=torch.uint8) for _ in range(2))
    swap_file.pack(state, layout, old)
    header = swap_file.pack(state | {"step": 8}, layout, new)
    assert swap_file.unpack(new, "file", layout, header)[0]["step"] == 8
    with pytest.raises(ValueError, match="file: it is whole, but of step 7 and not .* at step 8"):
        swap_file.unpack(old, "file", layout, header)
    empty = swap_file.write_empty(str(tmp_path / "file"), BLOCK_BYTES)
    nothing = torch.from_numpy(np.fromfile(tmp_path / "file", dtype=np.uint8))
    assert swap_file.unpack(nothing, "file", layout, empty) is None
    with pytest.raises(ValueError, match="of step 0 and not .* at step 8"):
        swap_file.unpack(nothing, "file", layout, header)
    with pytest.raises(ValueError, match="of step 8 and not .* at step 0"):
        swap_file.unpack(new, "file", layout, empty)


@pytest.mark.parametrize("keep", [0, 8, HEADER_BYTES, BLOCK_BYTES, -BLOCK_BYTES, -1])
def test_zero3_nvme_file_cut_short_is_an_error_that_names_it(tmp_path, keep):
    path = written(tmp_path / "file", packed(state_of())[:keep])
    with pytest.raises(ValueError, match="cut short|damaged|checksum is wrong") as caught:
        swap_file.read_whole(path)
    assert str(caught.value).startswith(path)


# --- The way to the disk -------------------------------------------------------------------------


def test_zero3_nvme_reserve_makes_a_file_longer_and_never_shorter(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"kept")
    swap_io.reserve(str(path), 10_000)
    swap_io.reserve(str(path), 5_000)
    assert path.stat().st_size == 10_000
    assert path.stat().st_blocks * 512 >= 10_000
    assert path.read_bytes().startswith(b"kept")


def test_zero3_nvme_reserve_without_room_is_an_error_that_names_the_file(tmp_path):
    path = str(tmp_path / "file")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match="10000 bytes are needed") as caught:
            swap_io.reserve(path, 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.filename == path
    assert caught.value.errno == errno.EFBIG


class Handle:
    """Stands for DeepSpeed's aio handle, which does what it is told and checks nothing."""

    def __init__(self):
        self.pending = self.waits = self.result = 0

    def async_pread(self, buffer, path, offset):
        self.pending += not self.result
        return self.result

    async_pwrite = async_pread

    def wait(self):
        assert self.pending
        self.waits += 1
        pending, self.pending = self.pending, 0
        return pending

    def new_cpu_locked_tensor(self, numel, like):
        return torch.empty(numel, dtype=like.dtype)

    def free_cpu_locked_tensor(self, tensor):
        pass


@pytest.fixture
def aligned():
    """512 bytes at an address that a disk can transfer to."""
    memory = torch.zeros(1024, dtype=torch.uint8)
    begin = -memory.data_ptr() % 512
    return memory[begin : begin + 512]


@pytest.fixture
def handle(tmp_path, aligned):
    """A checked handle with a write under way."""
    handle = CheckedHandle(Handle())
    handle.async_pwrite(aligned, str(tmp_path / "first"), 0)
    return handle


def test_zero3_nvme_handle_passes_on_what_is_right(tmp_path, handle, aligned):
    assert os.stat(tmp_path / "first").st_size == 512
    assert handle.async_pread(aligned, str(tmp_path / "first"), 0) == 0
    assert handle.wait() == 2


def truncated(path, handle, buffer):
    os.truncate(path, 511)
    return buffer


def gone(path, handle, buffer):
    os.remove(path)
    return buffer


def misaligned(path, handle, buffer):
    return buffer[1:]


def refused(path, handle, buffer):
    handle._handle.result = -1
    return buffer


REFUSED = [
    ("async_pread", truncated, "first: got 511 bytes, expected 512"),
    ("async_pread", gone, "No such file .*first"),
    ("async_pread", misaligned, "first: got a buffer at 0x.*, misaligned"),
    ("async_pwrite", misaligned, "first: got a buffer at 0x.*, misaligned"),
    ("async_pread", refused, "refused the transfer.*first"),
    ("async_pwrite", refused, "refused the transfer.*first"),
]


@pytest.mark.parametrize(("way", "trouble", "message"), REFUSED)
def test_zero3_nvme_handle_refuses_what_the_disk_cannot_do(
    tmp_path, handle, aligned, way, trouble, message
):
    buffer = trouble(tmp_path / "first", handle, aligned)
    with pytest.raises((OSError, ValueError), match=message):
        getattr(handle, way)(buffer, str(tmp_path / "first"), 0)
    assert handle._handle.waits == 1  # a handle must not die with a transfer under way


def test_zero3_nvme_buffers_are_shared_and_grow():
    pool = BufferPool(Handle())
    first, second = pool.take(100), pool.take(50)
    assert first is not second
    assert second.memory.numel() == 100  # as large as any that was asked for
    pool.give_back(first)
    assert pool.take(80) is first
    pool.give_back(first)
    assert pool.take(200).memory.numel() == 200


def test_zero3_nvme_buffer_leaves_moments_that_are_still_in_use_a_copy():
    buffer = Buffer(packed(state_of()))
    state, _ = swap_file.unpack(buffer.memory, "file")
    stores = [state[which].store for which in MOMENTS]
    before = [plain(MomentTensor(store)) for store in stores]
    buffer.users += map(weakref.ref, stores)
    view = state["exp_avg"][10:90]
    dense = view.clone()
    buffer.evict()
    buffer.memory.zero_()
    assert difference([plain(MomentTensor(store)) for store in stores], before) == ""
    assert torch.equal(view.clone(), dense)
