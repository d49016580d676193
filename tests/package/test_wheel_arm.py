# SPDX-License-Identifier: Apache-2.0
"""The wheel for aarch64, made on this machine, imported and run under emulation."""

import os
import subprocess
import sys
import sysconfig
import zipfile

import aarch64_python
import kernel_steps
import numpy as np
import processes
import pytest
import torch
from needs import need_aarch64
from places import ROOT, SUPPORT
from segments import Place, assert_same, copied, factors, integers, make, scalars_at

from zero8.op.codec_maps import codec_maps
from zero8.spec import reference

HYPER = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture(scope="module")
def binary(tmp_path_factory):
    """The kernel of the wheel, made as `make wheel` does."""
    need_aarch64()
    folder = tmp_path_factory.mktemp("wheel")
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    variables = f"VENV_PYTHON={sys.executable}", f"WHEELS={folder}"
    command = ["make", "-C", str(ROOT), "wheel-aarch64", *variables]
    done = processes.run(command, seconds=500, PATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*-cp311-abi3-linux_aarch64.whl")
    return zipfile.ZipFile(wheel).extract("zero8/op/zero8_kernel.abi3.so", folder)


def arrays_of(segment):
    """Return the memory of a segment, by the name of its field in a record."""
    found = {"param": segment.param, "grad": segment.grad}
    for number, moment in enumerate(segment.moments):
        found[f"moments.{number}.values"] = moment.values
        if moment.scales is not None:
            found[f"moments.{number}.scales"] = moment.scales
    return found


@pytest.mark.nightly
@pytest.mark.slow
def test_wheel_of_aarch64_under_emulation_steps_with_the_bits_of_the_reference(binary, tmp_path):
    python = aarch64_python.installed(tmp_path / "python")
    for number, (codec, dtype) in enumerate([("log", torch.float32), ("fp8", torch.bfloat16)]):
        place = Place((40, 300), 256, 128, 11000)
        segment = make(codec, place, scalars_at(1, HYPER), dtype, dtype)
        segment.grad.copy_(factors(place.numel, -8, 8, number))
        expected = copied(segment)
        reference.step(expected)
        folder = tmp_path / str(number)
        folder.mkdir()
        records, scalars = kernel_steps.packed([segment])
        for name, array in {"records": records, "scalars": scalars, "maps": codec_maps()}.items():
            np.save(folder / f"{name}.npy", array)
        for name, tensor in arrays_of(segment).items():
            np.save(folder / f"{name}.npy", integers(tensor).numpy())
        command = [*python, str(SUPPORT / "aarch64_step.py"), binary, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        for name, tensor in arrays_of(segment).items():
            integers(tensor).copy_(torch.from_numpy(np.load(folder / f"{name}.npy")))
        assert_same(segment, expected, codec)
