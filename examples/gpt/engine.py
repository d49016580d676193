# SPDX-License-Identifier: Apache-2.0
"""The optimizers and engines of the job: pairs, defaults, and what a config says of either."""

from pathlib import Path

from zero8.state.keywords import OWN_KEYS

# zero8's optimizers, each with its fp32 twin, which it is compared with.
TWINS = {
    "Adam8bitBlockwise": "AdamW",
    "Lion8bitBlockwise": "Lion",
    "SGD8bitBlockwise": "SGD",
    "Muon8bitBlockwise": "Muon",
}
DEEPSPEED, FSDP2 = "deepspeed", "fsdp2"
# The formats of the weights of the linear layers; all other weights are float32.
FLOAT32, INT8 = "float32", "int8"
# Of each engine: a config and a folder for results for each optimizer whose twin it has.
DEFAULTS = {
    DEEPSPEED: {
        "Adam8bitBlockwise": ("configs/zero2_offload.json", "runs/demo"),
        "Lion8bitBlockwise": ("configs/zero2_offload_lion.json", "runs/demo-lion"),
        "SGD8bitBlockwise": ("configs/zero2_offload_sgd.json", "runs/demo-sgd"),
        "Muon8bitBlockwise": ("configs/zero2_offload_muon.json", "runs/demo-muon"),
    },
    FSDP2: {
        "Adam8bitBlockwise": ("configs/fsdp2_offload.toml", "runs/demo-fsdp2"),
        "SGD8bitBlockwise": ("configs/fsdp2_offload_sgd.toml", "runs/demo-fsdp2-sgd"),
    },
}


def eight_bit_of(optimizer: str) -> str:
    """Return zero8's optimizer of a pair that has an optimizer of this name."""
    return next(ours for ours, twin in TWINS.items() if optimizer in (ours, twin))


def defaults(engine: str, optimizer: str, weights: str = FLOAT32) -> tuple[str, str]:
    """Return the config and the folder for results of a run with one optimizer of a pair.

    Raises:
        ValueError: if the engine has no twin of zero8's optimizer, or no such weights.
    """
    if (ours := eight_bit_of(optimizer)) not in DEFAULTS[engine]:
        pairs = [name for ours in DEFAULTS[engine] for name in (TWINS[ours], ours)]
        raise ValueError(f"got {optimizer} for the engine {engine}, expected one of {pairs}")
    if weights == INT8 and (engine == DEEPSPEED or optimizer not in TWINS):
        raise ValueError(
            f"got {INT8} weights for {optimizer} of the engine {engine}, expected {FLOAT32}: ZeRO "
            f"flattens weights, and the fp32 run has none; use --engine {FSDP2} and one of zero8's"
        )
    return DEFAULTS[engine][ours]


def keywords_of(
    params: dict, given: str | None, optimizer: str, codec: str | None, path: Path
) -> dict:
    """Return what an optimizer of a pair is made with.

    Args:
        params: zero8's keywords in a config.
        given: the config's type of optimizer.
        optimizer: zero8's, or its twin, which does not know zero8's own keys.
        codec: of zero8's states; None for the config's.
        path: of the config.

    Raises:
        ValueError: if the config is of another optimizer.
    """
    if given != (ours := eight_bit_of(optimizer)):
        raise ValueError(f"got optimizer type {given!r} in {str(path)!r}, expected {ours!r}")
    if optimizer != ours:
        return {key: value for key, value in params.items() if key not in OWN_KEYS}
    return params if codec is None else {**params, "codec": codec}


def engine_class(name: str) -> type:
    """Return the class of an engine; here alone is its framework imported.

    An engine is made of a model, of what its `load_config` returned, and, to go on from there, of
    the folder of `save`.  It has these attributes: `model`; `module`, which is called in its place;
    `optimizer`, the one that steps; `device`; `micro_batch_size`, windows of one rank at a time;
    `accumulation_steps`; and `steps_done`, those of the checkpoint it goes on from.
    `step(batches)` takes a step and returns the losses of this rank.
    """
    if name == DEEPSPEED:
        from examples.gpt.engine_deepspeed import DeepSpeedEngine

        return DeepSpeedEngine
    from examples.gpt.engine_fsdp2 import FSDP2Engine

    return FSDP2Engine
