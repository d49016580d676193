# SPDX-License-Identifier: Apache-2.0
"""Weights of which several stages of a pipeline have a copy; all copies must take the same steps.

Each stage cuts its parameters among its ranks at other places, and a block that is cut has two
scales, so that the codes of the copies would differ.  Float32 moments have no blocks.
"""

from torch.utils.weak import WeakTensorKeyDictionary

REASON = "tied across pipeline stages"

names = WeakTensorKeyDictionary()
"""The name of each in its module, which is the same in all stages."""
