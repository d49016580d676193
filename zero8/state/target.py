# SPDX-License-Identifier: Apache-2.0
"""The form in which an optimizer keeps the state of a parameter, and how others are brought to it.

`zero8.state.plain` describes the entries.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zero8.spec.algorithm import Algorithm
from zero8.spec.algorithms import algorithm_of_fp32
from zero8.spec.codec import Codec
from zero8.spec.grid import is_narrow
from zero8.spec.shown import shown_keys
from zero8.state.entries import codes_key, is_of_fp32
from zero8.state.extent import Extent
from zero8.state.header import Entries, StateHeader
from zero8.state.memory import checked_memory, new_memory, unknown_memory
from zero8.state.plain import checked_step, dense_part, float32_form, stores_of
from zero8.state.store import MomentStore
from zero8.state.table import Piece
from zero8.state.tell import tell_of_reencoding


@dataclass(frozen=True)
class Target:
    """The form of the state of a parameter, the whole one as a piece, or of this rank's part."""

    algorithm: Algorithm
    codec: Codec
    parameter: Piece
    extent: Extent
    device: torch.device | str = "cpu"

    def new(self) -> Entries:
        """Return the state of a parameter that has taken no step."""
        return self.entries_of(self._zeros(), {"step": 0, **new_memory(self.algorithm)})

    def entries_of(self, stores: Sequence[MomentStore], numbers: Entries) -> Entries:
        """Return the state whose moments are the (live) buffers of stores, in order.

        `numbers` are the step and the remembered numbers.
        """
        parameter, extent = self.parameter, self.extent
        codec = stores[0].codec if parameter.is_quantized else None
        place = parameter.block_size, parameter.identity, parameter.shape
        entries = numbers | {"format": StateHeader(self.algorithm, codec, *place).packed()}
        for store in stores:
            if not parameter.is_quantized:
                entries[store.name] = extent.entry(store.dense, extent.shape, extent.box)
                continue
            bits, grid = store.code.bits, parameter.grid
            box = extent.code_box(parameter, bits)
            codes = extent.entry(store.codes, grid.code_shape(extent.shape, bits), box)
            entries[codes_key(store.rule, store.code)] = codes
            scales, per_block = store.scales, store.code.scale_shape
            if is_narrow(extent.shape):  # groups are not sharded as rows are
                entries[f"{store.name}_scale"] = scales.view(-1, 1, *per_block)
                continue
            shape = (*grid.scale_shape(extent.shape), *per_block)
            box = extent.scale_box(parameter)
            entries[f"{store.name}_scale"] = extent.entry(scales, shape, box)
        return entries

    def adopted(self, saved: Entries) -> Entries:
        """Return a loaded state in new tensors; raise ValueError if the entries do not fit.

        Codes are kept verbatim if codec, block size and policy match the saved ones, otherwise they
        are requantized; float32 moments of another optimizer are quantized.
        """
        if is_of_fp32(saved):
            return self.from_fp32(saved)
        algorithm, name = self.algorithm, self.parameter.name
        header = StateHeader.of(saved, name)
        if header.algorithm is not algorithm:
            raise ValueError(
                f"state of {name}: got one of {header.algorithm.class_name}, expected one of "
                f"{algorithm.class_name}"
            )
        expected = ["step", *new_memory(algorithm)]
        if missing := [key for key in expected if key not in saved]:
            raise ValueError(f"state of {name}: got entries {shown_keys(saved)}, without {missing}")
        numbers = {"step": checked_step(saved), **checked_memory(algorithm, saved)}
        stores = stores_of(saved, self.extent, name)
        for store in stores:
            store.check_values()
        theirs = header.piece(name)
        wanted = replace(self, parameter=replace(self.parameter, identity=theirs.identity))
        kept = self.codec if self.parameter.is_quantized else None
        if (theirs, stores[0].codec) == (wanted.parameter, kept):
            return wanted.entries_of(
                [store.to(self.device, copy=True) for store in stores], numbers
            )
        tell_of_reencoding((stores[0].codec, theirs.block_size), (kept, self.parameter.block_size))
        return wanted._encoded([store.read(0, store.table.numel) for store in stores], numbers)

    def from_fp32(self, saved: Entries, *, check_values: bool = True) -> Entries:
        """Return an fp32 optimizer's state in new tensors; see `adopted` and `checked_dense`."""
        algorithm, name = self.algorithm, self.parameter.name
        step = checked_step(saved) if "step" in saved else algorithm.step_if_unknown
        needed = (*("step",) * (step is None), *algorithm.moment_names)
        if missing := [key for key in needed if key not in saved]:
            raise ValueError(
                f"state of {name}: got entries {shown_keys(saved)}, without {missing}; expected "
                f"a state of {algorithm.class_name} or of {algorithm.fp32_name}, which "
                'torch.distributed.checkpoint reads through state_dict_format="fp32", not flattened'
            )
        # SGD and Muon have the same.
        if (theirs := algorithm_of_fp32(saved)).moment_names != algorithm.moment_names:
            raise ValueError(
                f"state of {name}: got one of {theirs.fp32_name}, expected one of "
                f"{algorithm.fp32_name} or of {algorithm.class_name}"
            )
        moments = [
            dense_part(saved, rule, self.extent, name, check_values=check_values)
            for rule in algorithm.moments
        ]
        return self._encoded(moments, {"step": step, **unknown_memory(algorithm)})

    def take_assigned(self, entries: Entries, *, check_values: bool) -> None:
        """Bring moments that other code has put into a live state, and its step, to its form.

        Moments beside codes are encoded.  Raises ValueError if a moment or the step does not fit;
        nothing has changed then.
        """
        extent, step = self.extent, checked_step(entries)
        keeps_float32 = "format" in entries and not self.parameter.is_quantized
        assigned = {
            key: entries[key]
            for key in self.algorithm.moment_names
            if key in entries and not (keeps_float32 and self._is_kept(entries[key]))
        }
        if assigned:
            has_codes = "format" in entries and self.parameter.is_quantized
            others = float32_form(entries, extent) if has_codes else {}
            new = self.from_fp32({**entries, **others, **assigned}, check_values=check_values)
            for key in assigned:
                del entries[key]
            entries |= new
        entries["step"] = step

    def _is_kept(self, value: object) -> bool:
        """Return whether a moment has the form of float32 ones."""
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            return False
        return self.extent.has_form(value)

    def _zeros(self) -> list[MomentStore]:
        table, rules = self.extent.table(self.parameter), self.algorithm.moments
        return [MomentStore.zeros(self.codec, rule, table, self.device) for rule in rules]

    def _encoded(self, moments: Sequence[Tensor], numbers: Entries) -> Entries:
        """Return a new state with these moments, (elements of the part,) each."""
        stores = self._zeros()
        for store, values in zip(stores, moments, strict=True):
            store.write(0, values)
        return self.entries_of(stores, numbers)
