# SPDX-License-Identifier: Apache-2.0
"""Where the C++ and CUDA sources are."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def source_folder() -> Path:
    """Return the folder of the C++ sources: beside the package, or inside it in a wheel."""
    for folder in (_PACKAGE / "csrc", _PACKAGE.parent / "csrc"):
        if (folder / "binding.cpp").is_file():
            return folder
    raise FileNotFoundError(
        f"the C++ sources of zero8 are neither in {_PACKAGE / 'csrc'} nor in "
        f"{_PACKAGE.parent / 'csrc'}; reinstall zero8"
    )
