# SPDX-License-Identifier: Apache-2.0
"""zero8: 8-bit block-wise optimizer states for DeepSpeed ZeRO-offload and plain PyTorch.

Importing it registers its optimizers as types of DeepSpeed's configs, such as "Adam8bitBlockwise".
"""

from importlib import import_module
from typing import TYPE_CHECKING

from zero8 import autoload

if TYPE_CHECKING:  # type checkers, editors and the API reference cannot follow `__getattr__`
    from zero8.muon import Muon8bitBlockwise as Muon8bitBlockwise
    from zero8.optimizer import Adam8bitBlockwise as Adam8bitBlockwise
    from zero8.optimizer import AdEMAMix8bitBlockwise as AdEMAMix8bitBlockwise
    from zero8.optimizer import Lion8bitBlockwise as Lion8bitBlockwise
    from zero8.optimizer import SGD8bitBlockwise as SGD8bitBlockwise
    from zero8.stable_embedding import StableEmbedding as StableEmbedding
    from zero8.way_back import export as export
    from zero8.zero.active import assert_active as assert_active

__version__ = "0.1.0.dev0"
# The modules of the public names; each is imported when its name is first used.
_MODULES = {
    "Adam8bitBlockwise": "zero8.optimizer",
    "AdEMAMix8bitBlockwise": "zero8.optimizer",
    "Lion8bitBlockwise": "zero8.optimizer",
    "Muon8bitBlockwise": "zero8.muon",
    "SGD8bitBlockwise": "zero8.optimizer",
    "StableEmbedding": "zero8.stable_embedding",
    "assert_active": "zero8.zero.active",
    "export": "zero8.way_back",
}
__all__ = ["__version__", *_MODULES]

autoload.install()


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module 'zero8' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
