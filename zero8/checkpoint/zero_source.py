# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of DeepSpeed's ZeRO: the folder of a tag, with a file of states for each rank."""

import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from torch import Tensor

from zero8.checkpoint.fragment import Fragment, of_piece
from zero8.checkpoint.safe_load import Inert, load
from zero8.checkpoint.source import Facts, Source
from zero8.state.header import MOMENTS
from zero8.state.plain import checked_history, checked_step
from zero8.zero import swap_file
from zero8.zero.moment_tensor import MomentTensor

STATES = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_SWAPPED = "offloaded_tensors/rank*/zero8-*.tensor.swp"
# Names of master weights in stages 1 and 2 (and BF16_Optimizer), and in stage 3.
_WEIGHTS = ("single_partition_of_fp32_groups", "fp32_flat_groups")
# Names of our state dict within ZeRO's.
_STATES = ("base_optimizer_state", "optimizer_state_dict")


class ZeroSource(Source):
    """See `Source`."""

    def __init__(self, folder: Path):
        """Look at the folder of a tag."""
        self.path = folder
        self._files = sorted(
            (path for path in folder.iterdir() if STATES.fullmatch(path.name)), key=_ranks
        )

    @classmethod
    def is_at(cls, folder: Path) -> bool:
        """Return whether a folder is that of a tag of ZeRO's."""
        return any(STATES.fullmatch(path.name) for path in folder.iterdir())

    def facts(self) -> Facts:
        """See `Source`."""
        zero = self._zero(self._files[0])
        stage, count = zero.get("zero_stage"), zero.get("partition_count")
        stage = stage.args[0] if isinstance(stage, Inert) and stage.args else stage
        count = max(count, default=None) if isinstance(count, list) else count
        return Facts("zero", count, stage if isinstance(stage, int) else None)

    def files(self) -> list[Path]:
        """See `Source`; with states on NVMe also their swap files."""
        return self._files + sorted(self.path.glob(_SWAPPED))

    def fragments(self, file: Path) -> Iterator[Fragment]:
        """See `Source`."""
        if not STATES.fullmatch(file.name):
            yield from self._swapped(file)
            return
        zero = self._zero(file)
        all_weights = _first(zero, _WEIGHTS, file)
        states = _first(zero, _STATES, file)
        try:
            pairs = [
                (states["state"][n], w) for n, w in enumerate(all_weights) if n in states["state"]
            ]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{file}: its states are damaged: {error!r}") from error
        for state, weights in pairs:
            if state:
                yield from _of_partition(file, _part(file), state, weights)

    def _swapped(self, file: Path) -> Iterator[Fragment]:
        found = swap_file.read_whole(str(file))
        if found is not None:
            yield from _of_partition(file, "", found[0], None)

    def groups(self) -> list[dict]:
        """See `Source`; names are in the order of the model."""
        states = _first(self._zero(self._files[0]), _STATES, self._files[0])
        shapes = self._model.get("param_shapes") or []
        groups = states["param_groups"]
        if len(shapes) != len(groups):  # stage 3 lists sub-groups
            names = [name for each in shapes for name in each]
            shapes = [names] if len(groups) == 1 else []
        return [
            {**group, "params": list(names)} for group, names in zip(groups, shapes, strict=False)
        ]

    @cached_property
    def _model(self) -> dict:
        """What is saved of the model beside the states, {} if there is nothing."""
        files = sorted(self.path.glob("*mp_rank_00_model_states.pt"))
        found = load(files[0]) if files else {}
        return found if isinstance(found, dict) else {}

    def _zero(self, file: Path) -> dict:
        """Return ZeRO's own state dict in a file."""
        found = load(file)
        zero = found.get("optimizer_state_dict") if isinstance(found, dict) else None
        if not isinstance(zero, dict):
            raise ValueError(f"{file}: not a file of ZeRO's states: no optimizer_state_dict in it")
        return zero


def _of_partition(file: Path, part: str, state: dict, weights: object) -> Iterator[Fragment]:
    """Yield the fragments of a partition, one for each piece of its segment table."""
    moments = [state.get(which) for which in MOMENTS]
    if not all(isinstance(moment, MomentTensor) for moment in moments):
        raise ValueError(
            f"{file}: got a state with entries {sorted(state)} that are no 8-bit moments; was it "
            "saved by another optimizer?"
        )
    stores = [moment.store for moment in moments]
    table = stores[0].table
    if stores[1].table.places != table.places or [s.which for s in stores] != list(MOMENTS):
        raise ValueError(f"{file}: its two moments are of different elements")
    step, history = checked_step(state), checked_history(state)
    if isinstance(weights, Tensor) and weights.numel() != table.numel:
        weights = None  # swapped out
    correction = state.get("param_correction")
    for number, piece in enumerate(table.pieces):
        here = slice(piece.start, piece.start + piece.numel)
        yield Fragment(
            part,
            piece.name,
            file,
            step,
            history,
            tuple(of_piece(store, number) for store in stores),
            weights.view(-1)[here] if isinstance(weights, Tensor) else None,
            correction[here] if isinstance(correction, Tensor) else None,
        )


def _ranks(path: Path) -> tuple[int, int]:
    data, model = map(int, STATES.fullmatch(path.name).groups())
    return model, data


def _part(path: Path) -> str:
    model, _ = _ranks(path)
    return f"mp_rank_{model:02d}" if model else ""


def _first(found: dict, names: tuple[str, ...], file: Path) -> object:
    for name in names:
        if name in found:
            return found[name]
    raise ValueError(f"{file}: got entries {sorted(found)}, without one of {list(names)}")
