# SPDX-License-Identifier: Apache-2.0
"""The TOML config of a run under FSDP2: one file for both optimizers, one word apart."""

import sys
from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path

from examples.gpt.engine import TWINS, eight_bit_of
from examples.gpt.schedule import Schedule
from zero8.state.keywords import OWN_KEYS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PRECISIONS = ("none", "bf16")
# All of them must be given: the defaults of zero8's optimizer and of its twin may differ.
SHARED_KEYS = {
    "Adam8bitBlockwise": ("lr", "betas", "eps", "weight_decay"),
    "SGD8bitBlockwise": ("lr", "momentum", "nesterov", "weight_decay"),
}


@dataclass(frozen=True)
class OptimizerSettings:
    """The section [optimizer], for one of the optimizers.

    Attributes:
        name: zero8's optimizer, or its twin.
        keywords: what it is made with.
    """

    name: str
    keywords: dict


@dataclass(frozen=True)
class FSDP2Settings:
    """The section [fsdp2].

    Attributes:
        offload: whether parameters, gradients and states are in host memory.
        mixed_precision: of forward and backward, one of `PRECISIONS`.
    """

    offload: bool
    mixed_precision: str


@dataclass(frozen=True)
class Settings:
    """All that a config says, by its keys.

    Attributes:
        micro_batch_size: windows of one rank at a time.
        accumulation_steps: micro batches of a step.
        gradient_clipping: the largest norm of all gradients together.
        optimizer: which, and its keywords.
        scheduler: the learning rate over the run.
        fsdp2: how the model is sharded.
    """

    micro_batch_size: int
    accumulation_steps: int
    gradient_clipping: float
    optimizer: OptimizerSettings
    scheduler: Schedule
    fsdp2: FSDP2Settings


def load_config(path: Path, optimizer: str, steps: int, codec: str | None = None) -> Settings:
    """Return the config at `path` for a run with one of the optimizers, `steps` steps long.

    The codec is that of the run, if given.

    Raises:
        ValueError: for what is no such config; it names the file and what is wrong.
    """
    try:
        content = tomllib.loads(path.read_text())
        _check_keys(content, "top level", [field.name for field in fields(Settings)])
        schedule = _checked(Schedule, content["scheduler"], "[scheduler]", total_steps=steps)
        sections = {
            "optimizer": _optimizer(content["optimizer"], optimizer, codec),
            "scheduler": schedule,
            "fsdp2": _fsdp2(content["fsdp2"]),
        }
        return _checked(Settings, content | sections, "top level")
    except ValueError as error:
        raise ValueError(
            f"{str(path)!r}: {error}; configs/fsdp2_offload.toml is a valid config"
        ) from error


def _optimizer(section: dict, name: str, codec: str | None) -> OptimizerSettings:
    eight_bit = eight_bit_of(name)
    _check_keys(section, "[optimizer]", {"type", *SHARED_KEYS[eight_bit]}, OWN_KEYS)
    if section["type"] != eight_bit:
        raise ValueError(
            f"got optimizer type {section['type']!r}, expected {eight_bit!r}; the run with "
            f"{TWINS[eight_bit]} takes the same file"
        )
    dropped = {"type"} if name == eight_bit else {"type", *OWN_KEYS}
    keywords = {key: value for key, value in section.items() if key not in dropped}
    if name == eight_bit and codec is not None:
        keywords["codec"] = codec
    return OptimizerSettings(name, keywords)


def _fsdp2(section: dict) -> FSDP2Settings:
    settings = _checked(FSDP2Settings, section, "[fsdp2]")
    if settings.mixed_precision not in PRECISIONS:
        raise ValueError(
            f"[fsdp2]: got mixed_precision = {settings.mixed_precision!r}, expected one of "
            f"{list(PRECISIONS)}"
        )
    return settings


def _checked(cls: type, section: dict, where: str, **given):
    """Return a dataclass made of a section and of what is given; check keys and values.

    Numbers are positive.
    """
    types = {field.name: field.type for field in fields(cls) if field.name not in given}
    _check_keys(section, where, types)
    for key, value in section.items():
        valid = (int, float) if types[key] is float else (types[key],)
        # Not isinstance, for which True is an int.
        if type(value) not in valid or (type(value) in (int, float) and value <= 0):
            sign = "positive " if types[key] in (int, float) else ""
            expected = f"a {sign}{types[key].__name__}"
            raise ValueError(f"{where}: got {key} = {value!r}, expected {expected}")
    return cls(**section, **given)


def _check_keys(
    section: dict, where: str, required: Collection[str], others: Collection[str] = ()
) -> None:
    if not isinstance(section, dict):
        raise ValueError(f"{where}: got {section!r}, expected a section")
    valid = f"valid keys are {', '.join(sorted([*required, *others]))}"
    if unknown := sorted(section.keys() - {*required, *others}):
        raise ValueError(f"{where}: got unknown key {unknown[0]!r}; {valid}")
    if missing := sorted(set(required) - section.keys()):
        raise ValueError(f"{where}: expected the key {missing[0]!r} too; {valid}")
