# SPDX-License-Identifier: Apache-2.0
"""zero8: 8-bit block-wise optimizer states for DeepSpeed ZeRO-offload and plain PyTorch.

Importing it registers its optimizers as types of DeepSpeed's configs, such as "Adam8bitBlockwise".
"""

from importlib import import_module
from typing import TYPE_CHECKING

from zero8 import autoload

if TYPE_CHECKING:  # type checkers, editors and the API reference cannot follow `__getattr__`
    from zero8.deepspeed.constructing import assert_active as assert_active
    from zero8.optimizer.elementwise import Adam8bitBlockwise as Adam8bitBlockwise
    from zero8.optimizer.elementwise import AdEMAMix8bitBlockwise as AdEMAMix8bitBlockwise
    from zero8.optimizer.elementwise import Lion8bitBlockwise as Lion8bitBlockwise
    from zero8.optimizer.elementwise import SGD8bitBlockwise as SGD8bitBlockwise
    from zero8.optimizer.muon import Muon8bitBlockwise as Muon8bitBlockwise
    from zero8.optimizer.stable_embedding import StableEmbedding as StableEmbedding
    from zero8.optimizer.way_back import export as export

__version__ = "0.1.0.dev0"
# The modules of the public names; each is imported when its name is first used.
_MODULES = {
    "Adam8bitBlockwise": "zero8.optimizer.elementwise",
    "AdEMAMix8bitBlockwise": "zero8.optimizer.elementwise",
    "Lion8bitBlockwise": "zero8.optimizer.elementwise",
    "Muon8bitBlockwise": "zero8.optimizer.muon",
    "SGD8bitBlockwise": "zero8.optimizer.elementwise",
    "StableEmbedding": "zero8.optimizer.stable_embedding",
    "assert_active": "zero8.deepspeed.constructing",
    "export": "zero8.optimizer.way_back",
}
__all__ = ["__version__", *_MODULES]

autoload.install()


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module 'zero8' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
