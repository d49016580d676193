# SPDX-License-Identifier: Apache-2.0
"""What the files of a checkpoint hold, parameter by parameter."""

from pathlib import Path

from zero8.checkpoint.read.fragment import Fragment
from zero8.checkpoint.read.open import open_checkpoint
from zero8.checkpoint.read.source import Source


def fragments_in(checkpoint: Path | Source) -> list[Fragment]:
    """Return the fragments of all parameters; raises ValueError for files that are damaged."""
    source = checkpoint if isinstance(checkpoint, Source) else open_checkpoint(Path(checkpoint))
    return [fragment for name in source.names for fragment in source.fragments(name)]
