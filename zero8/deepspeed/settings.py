# SPDX-License-Identifier: Apache-2.0
"""The section "zero8" of a DeepSpeed config, which DeepSpeed ignores."""

from dataclasses import dataclass, fields

SECTION = "zero8"


@dataclass(frozen=True)
class CheckpointSettings:
    """Settings of checkpoints.

    Attributes:
        load_previous_if_damaged: whether to load the previous complete checkpoint if the one that
            `latest` names is damaged or incomplete; not if the caller gives a tag.
        keep_checkpoints: how many complete checkpoints to keep after a save; 0: all of them.
    """

    load_previous_if_damaged: bool = False
    keep_checkpoints: int = 0

    @classmethod
    def of(cls, config: dict) -> "CheckpointSettings":
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
        if type(settings.load_previous_if_damaged) is not bool:
            got = settings.load_previous_if_damaged
            raise ValueError(f'"{SECTION}": load_previous_if_damaged: got {got!r}, expected a bool')
        keep = settings.keep_checkpoints
        if type(keep) is not int or keep < 0:
            raise ValueError(
                f'"{SECTION}": keep_checkpoints: got {keep!r}, expected an integer, 0 for all'
            )
        return settings
