# SPDX-License-Identifier: Apache-2.0
"""One step with a wheel's binary by a Python that has numpy and no torch; see test_wheel_arm.py.

Arguments: the binary, and a folder with the arrays of a step, which are overwritten.
"""

import importlib.util
import sys
from pathlib import Path

import numpy as np

library, folder = sys.argv[1], Path(sys.argv[2])
arrays = {path.stem: np.load(path) for path in folder.glob("*.npy")}
records = arrays.pop("records")
scalars, maps = arrays.pop("scalars"), arrays.pop("maps")
for name, array in arrays.items():
    *path, field = name.split(".")  # such as moments.0.values
    owner = records[0]
    for part in path:
        owner = owner[int(part) if part.isdecimal() else part]
    owner[field] = array.ctypes.data

spec = importlib.util.spec_from_file_location("zero8_kernel", library)
op = importlib.util.module_from_spec(spec)
spec.loader.exec_module(op)
op.step(records, scalars, maps, 2, op.isas()["neon"])
assert not records["nonfinite_blocks"].any()
for name, array in arrays.items():
    np.save(folder / f"{name}.npy", array)
