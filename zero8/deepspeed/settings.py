# SPDX-License-Identifier: Apache-2.0
"""The section "zero8" of a DeepSpeed config, which DeepSpeed ignores."""

from dataclasses import dataclass, fields

SECTION = "zero8"


@dataclass(frozen=True)
class EngineSettings:
    """Settings of an engine that steps with an optimizer of zero8.

    Attributes:
        load_previous_if_damaged: whether to load the previous complete checkpoint if the one that
            `latest` names is damaged or incomplete; not if the caller gives a tag.
        keep_checkpoints: how many complete checkpoints to keep after a save; 0: all of them.
        step_in_forward: whether `engine.step()` returns before the optimizer has stepped, and the
            steps go on behind the next forward; ZeRO-3 with `offload_optimizer` only.
    """

    load_previous_if_damaged: bool = False
    keep_checkpoints: int = 0
    step_in_forward: bool = False

    @classmethod
    def of(cls, config: dict) -> "EngineSettings":
        """Return the settings in a DeepSpeed config.

        Raises:
            ValueError: for unknown keys and bad values; it names the valid ones.
        """
        section = config.get(SECTION, {})
        valid = [field.name for field in fields(cls)]
        if not isinstance(section, dict):
            raise ValueError(f'"{SECTION}": got {section!r}, expected a section with {valid}')
        if unknown := sorted(set(section) - set(valid)):
            raise ValueError(f'"{SECTION}": unknown key {unknown[0]!r}; valid are {valid}')
        settings = cls(**section)
        for name in ("load_previous_if_damaged", "step_in_forward"):
            if type(got := getattr(settings, name)) is not bool:
                raise ValueError(f'"{SECTION}": {name}: got {got!r}, expected a bool')
        keep = settings.keep_checkpoints
        if type(keep) is not int or keep < 0:
            raise ValueError(
                f'"{SECTION}": keep_checkpoints: got {keep!r}, expected an integer, 0 for all'
            )
        return settings
