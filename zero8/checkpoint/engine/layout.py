# SPDX-License-Identifier: Apache-2.0
"""Where DeepSpeed's engine keeps the parts of a checkpoint, in the folder of a tag."""

from pathlib import Path

_HOLDS_LOCAL_FILES = "offloaded_tensors"


def is_part(path: str) -> bool:
    """Return whether DeepSpeed takes a file in the folder of a tag for a part of the checkpoint."""
    return "_states.pt" in path or path.startswith(f"{_HOLDS_LOCAL_FILES}/")


def swap_folder(engine, load_dir: str, tag: str) -> str:
    """Return the folder of a checkpoint for the swap files of this rank."""
    from deepspeed.checkpoint.ds_to_universal import dp_index_to_str

    rank = engine.local_rank if engine.use_node_local_storage() else engine.global_rank
    return str(Path(load_dir, tag, _HOLDS_LOCAL_FILES, "rank" + dp_index_to_str(rank)))
