# SPDX-License-Identifier: Apache-2.0
"""What a file in configs/ says of a run: JSON is DeepSpeed's, TOML is of `FSDP2Engine`."""

import json
import tomllib
from pathlib import Path

from zero8.state.keywords import OWN_KEYS

# zero8's optimizers, each with its fp32 twin, which it is compared with.
TWINS = {
    "Adam8bitBlockwise": "AdamW",
    "Lion8bitBlockwise": "Lion",
    "SGD8bitBlockwise": "SGD",
    "Muon8bitBlockwise": "Muon",
}
# The formats of the weights of the linear layers; all other weights are float32.
FLOAT32, INT8 = "float32", "int8"


def is_of_fsdp2(path: Path) -> bool:
    """Return whether a config is of FSDP2, not of DeepSpeed."""
    return path.suffix == ".toml"


def load_config(path: Path, optimizer: str, codec: str | None = None) -> dict:
    """Return the config at `path`, in the words of DeepSpeed's, with its optimizer or the twin."""
    text = path.read_text()
    config = tomllib.loads(text) if is_of_fsdp2(path) else json.loads(text)
    section = config.get("optimizer", {})
    given = section.pop("type", None)
    params = section if is_of_fsdp2(path) else section.get("params", {})
    ours = next(ours for ours, twin in TWINS.items() if optimizer in (ours, twin))
    if given != ours:
        raise ValueError(f"got optimizer type {given!r} in {str(path)!r}, expected {ours!r}")
    if optimizer != ours:
        params = {key: value for key, value in params.items() if key not in OWN_KEYS}
    elif codec is not None:
        params = {**params, "codec": codec}
    return {**config, "optimizer": {"type": optimizer, "params": params}}
