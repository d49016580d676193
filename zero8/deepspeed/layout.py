# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's file names in the folder of a tag, and which of them it reads."""

MASTERS = {"single_partition_of_fp32_groups", "fp32_flat_groups"}
"""The keys of master weights in files of stages 1 and 2 (and BF16_Optimizer), and of stage 3."""


def is_part(path: str) -> bool:
    """Return whether DeepSpeed would read a file in the folder of a tag as part of it."""
    return "_states.pt" in path


def loads_states(engine, options: dict) -> bool:
    """Return whether a load with these arguments of `load_checkpoint` loads optimizer states."""
    if engine.load_universal_checkpoint():
        return True  # whatever the arguments
    return options.get("load_optimizer_states", True) and not options.get("load_module_only")


def reads(engine, options: dict, path: str) -> bool:
    """Return whether a load reads a file of the tag: ZeRO-3 has its weights beside the states."""
    if not path.endswith("optim_states.pt") or loads_states(engine, options):
        return True
    return engine.zero_optimization_partition_weights()
