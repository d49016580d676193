# SPDX-License-Identifier: Apache-2.0
"""ZeRO-3 with the optimizer on a disk does what it does in host memory, in files without names."""

import errno
import os
import resource
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest
import torch
from full_disk import file_size_limit
from nests import assert_same
from params import each
from ranks import error_of, on_ranks
from zero_worker import (
    BF16_MASTERS,
    LION,
    MIX,
    SGD,
    Bag,
    base_optimizer,
    config,
    held,
    make_engine,
    moments_of,
    take_step,
)

from zero8.deepspeed import streaming
from zero8.deepspeed.gradients import masters_of
from zero8.files import scratch
from zero8.files.scratch import in_pages

RANK = int(os.environ.get("RANK", 0))
CORRECTED = {"dtype": BF16_MASTERS, "weight_correction_bits": 8}
GAS = {"gradient_accumulation_steps": 2}
MUON = {"optimizer": "Muon8bitBlockwise", "adam_params": ["*embed*"]}
# The options of `config`, and more of it.
ROWS = {
    "fp32": ({}, GAS),
    "bf16": ({"dtype": {}}, {"gradient_clipping": 0.5}),
    "bf16, sums of gradients": ({"dtype": {}}, GAS),
    "24-bit masters": (CORRECTED, {}),
    "Lion": ({"dtype": {}, **LION}, {}),
    "SGD": ({"dtype": {}, **SGD}, {}),
    "AdEMAMix": ({"dtype": {}, **MIX}, {}),
    "Muon": ({"dtype": {}, **MUON}, {}),
    "steps behind the forward": ({"dtype": {}}, {"zero8": {"step_in_forward": True}}),
    "float32 states": ({"dtype": BF16_MASTERS, "min_8bit_size": 10**9}, {}),
}
QUICK = ("bf16, sums of gradients", "24-bit masters")


def made(row, folder):
    """Return an engine with the optimizer in a folder, or, for None, in host memory."""
    scratch.SMALL_BYTES = 0
    options, more = ROWS[row]
    place = {"device": "cpu" if folder is None else "nvme", "pin_memory": False}
    place |= {} if folder is None else {"nvme_path": folder}
    zero = {"sub_group_size": 5000, "offload_optimizer": place}
    return make_engine(config(stage=3, offload=None, zero=zero, **options) | more, Bag())


def steps(engine, first, number=3):
    for step in range(first, first + number):
        for _ in range(engine.gradient_accumulation_steps()):
            take_step(engine, step)
    assert base_optimizer(engine).states  # waits for steps behind the forward
    return held(engine)


def file_at(address):
    """Return what is mapped at an address, as the system names it."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, *_, name = line.split(maxsplit=5)
        begin, end = (int(one, 16) for one in place.split("-"))
        if begin <= address < end:
            return name
    raise AssertionError(f"nothing at {address:#x}")


def tensors_of(engine):
    """Return, by what they are, the tensors of a rank's partitions."""
    found = {}
    weights = engine.optimizer.fp16_partitioned_groups_flat
    for number, p in enumerate(masters_of(engine.optimizer)):
        state = base_optimizer(engine).state[p]
        if p.dtype != weights[number].dtype:  # else it is the weights themselves
            found[f"master {number}"] = p
        for moment in moments_of(state):
            buffers = moment.store.buffers
            found |= {f"{moment.store.name} {number} {at}": x for at, x in enumerate(buffers)}
        if "param_correction" in state:
            found[f"correction {number}"] = state["param_correction"]
        if engine.gradient_accumulation_steps() > 1:
            found[f"gradient {number}"] = p.grad
    return {name: x for name, x in found.items() if x.numel()}


def assert_in_files(engine, folder):
    """All that the step reads and writes is in files, which have no names."""
    for name, tensor in tensors_of(engine).items():
        assert file_at(tensor.data_ptr()).startswith(f"{folder}/"), name
    assert not os.listdir(folder)


@each(ROWS, [name for name in ROWS if name not in QUICK])
@on_ranks(2)
def test_zero3_on_a_disk_has_the_bits_and_the_checkpoints_of_host_memory(name):
    with TemporaryDirectory() as folder:
        places = {"disk": f"{folder}/disk", "memory": None}
        engines = {place: made(name, where) for place, where in places.items()}
        assert_in_files(engines["disk"], places["disk"])
        saved = {}
        for place, engine in engines.items():
            steps(engine, 0)
            engine.save_checkpoint(f"{folder}/{place}-saved", tag="tag")
            saved[place] = held(engine)
        assert_same(saved["disk"], saved["memory"])
        after = steps(engines["memory"], 3)
        assert_same(steps(engines["disk"], 3), after)
        for place, other in (("disk", "memory"), ("memory", "disk"), ("disk", "disk")):
            engine = made(name, places[place])
            engine.load_checkpoint(f"{folder}/{other}-saved")
            assert_same(held(engine), saved[place])
            assert_same(steps(engine, 3), after)
            if place == "disk":
                assert_in_files(engine, places["disk"])


@on_ranks(2)
def test_zero3_on_a_disk_without_room_raises_on_all_ranks_before_a_step():
    with TemporaryDirectory() as folder:
        for limit, what in ((1000, "master weights"), (20_000, "optimizer states")):
            with file_size_limit(limit if RANK == 1 else resource.RLIM_INFINITY):
                kind, text = error_of(made, "float32 states", folder)
            assert kind == "OSError"
            of_other = f"1 other rank(s) could not make files of {what}; rank 1: "
            expected = folder if RANK == 1 else of_other
            assert expected in text and "bytes are needed" in text
            torch.distributed.barrier()


@on_ranks(1)
def test_zero3_on_a_disk_reads_and_writes_each_file_once_in_a_step():
    with TemporaryDirectory() as folder:
        engine = made("bf16", folder)
        expected = sum(in_pages(x.nbytes) for x in tensors_of(engine).values())
        with ExitStack() as stack:
            counted = [
                stack.enter_context(patch.object(os, name, wraps=getattr(os, name)))
                for name in ("preadv", "pwritev")
            ]
            steps(engine, 0, 1)
        for one in counted:
            places = [memory for call in one.call_args_list for memory in call.args[1]]
            assert sum(map(len, places)) == expected


@on_ranks(1)
def test_zero3_on_a_disk_that_fails_ends_the_process():
    for name in ("preadv", "pwritev"):
        with TemporaryDirectory() as folder:
            engine = made("bf16", folder)
            with (
                patch.object(os, name, side_effect=OSError(errno.EIO, "failed")),
                patch.object(streaming, "end_process", side_effect=SystemExit) as ended,
                pytest.raises(SystemExit),
            ):
                steps(engine, 0, 1)
            assert ended.called


@on_ranks(1)
def test_zero3_on_a_disk_loads_after_a_step_that_has_failed():
    """What has been read ahead for that step counts no more."""
    found = []
    with TemporaryDirectory() as folder:
        for fails in (False, True):
            engine = made("bf16", f"{folder}/{fails}")
            steps(engine, 0)
            engine.save_checkpoint(f"{folder}/saved", tag=str(fails))
            if fails:
                with patch.object(base_optimizer(engine), "step", side_effect=ValueError("failed")):
                    assert error_of(take_step, engine, 5) == ("ValueError", "failed")
                engine.optimizer._clear_fp32_optimizer_param_groups()
                engine.load_checkpoint(f"{folder}/saved", tag="False")
            found.append(steps(engine, 3))
    assert_same(*found)
