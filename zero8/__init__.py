# SPDX-License-Identifier: Apache-2.0
"""zero8: Adam with 8-bit block-wise states for DeepSpeed ZeRO-offload and plain PyTorch.

Importing it registers the DeepSpeed optimizer type "Adam8bitBlockwise".
"""

from zero8 import autoload

__version__ = "0.2.0.dev0"
__all__ = ["Adam8bitBlockwise", "__version__", "assert_active", "export"]

autoload.install()


def __getattr__(name: str):
    if name == "Adam8bitBlockwise":
        from zero8.optimizer import Adam8bitBlockwise

        return Adam8bitBlockwise
    if name == "assert_active":
        from zero8.active import assert_active

        return assert_active
    if name == "export":
        from zero8.way_back import export

        return export
    raise AttributeError(f"module 'zero8' has no attribute {name!r}")
