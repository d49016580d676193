# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of DeepSpeed's ZeRO: the folder of a tag, with a file of states per rank."""

import re
from collections.abc import Callable, Collection, Iterator
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from zero8.checkpoint.read.fragment import Fragment, of_piece
from zero8.checkpoint.read.inert import Inert
from zero8.checkpoint.read.safe_load import damage_in, load
from zero8.checkpoint.read.source import Facts, Source, in_threads
from zero8.deepspeed.layout import MASTERS
from zero8.deepspeed.moment_tensor import moments_in, with_moments
from zero8.spec.algorithms import algorithm_called
from zero8.spec.buffers import check_entry
from zero8.spec.shown import shown_keys
from zero8.state.memory import checked_memory
from zero8.state.plain import checked_step
from zero8.state.store import MomentStore
from zero8.state.table import PieceTable

STATES = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL_STATES = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_00_model_states\.pt")
# Names of our state dict within ZeRO's.
_STATES = ("base_optimizer_state", "optimizer_state_dict")

_STAGES = ("disabled", "optimizer_states", "gradients", "weights")
# What an engine saves of the model and its layout; all else is of the run, or of the script.
_LAYOUT = {
    *("module", "buffer_names", "optimizer", "param_shapes", "shared_params"),
    *("frozen_param_shapes", "frozen_param_fragments", "ds_config", "ds_version"),
    *("dp_world_size", "mp_world_size"),
}
_SCALING = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")


class ZeroSource(Source):
    """See `Source`."""

    def __init__(self, folder: Path):
        """List the files of states in the folder of a tag."""
        self.path = folder
        self._files = sorted(
            (path for path in folder.iterdir() if STATES.fullmatch(path.name)), key=_ranks
        )

    def facts(self) -> Facts:
        """See `Source`."""
        zero = self._settings
        count = zero.get("partition_count")
        counts = count if isinstance(count, list) else [count]
        count = max((one for one in counts if isinstance(one, int)), default=None)
        return Facts("zero", count, _stage(zero.get("zero_stage")))

    def files(self) -> list[Path]:
        """See `Source`."""
        return self._files

    def damages(self) -> list[str]:
        """See `Source`."""
        return self._read[1]

    def names(self) -> list[str]:
        """See `Source`."""
        return list(self._read[0])

    def fragments(self, name: str) -> list[Fragment]:
        """See `Source`."""
        return self._read[0][name]

    @cached_property
    def _read(self) -> tuple[dict[str, list[Fragment]], list[str]]:
        """The fragments of all files, by parameter, and the errors of those that are damaged."""

        def fragments_of(file: Path) -> list[Fragment] | str:
            try:
                return list(self._fragments_in(file))
            except (ValueError, OSError) as error:
                return str(error) if str(file) in str(error) else f"{file}: {error}"

        fragments: dict[str, list[Fragment]] = {}
        damages = []
        for _, found in in_threads("read", self._files, fragments_of):
            if isinstance(found, str):
                damages.append(found)
                continue
            for fragment in found:
                fragments.setdefault(fragment.name, []).append(fragment)
        return fragments, damages

    def _fragments_in(self, file: Path) -> Iterator[Fragment]:
        """Yield the fragments of a file."""
        zero = self._zero(file)
        with damage_in(file):
            all_weights = _first(zero, MASTERS, file)
            states = _first(zero, _STATES, file)["state"]
            pairs = [(states[n], w) for n, w in enumerate(all_weights) if states.get(n)]
        for state, weights in pairs:
            yield from _of_partition(file, state, weights)

    def groups(self) -> list[dict]:
        """See `Source`; names are in the order of the model."""
        file = self._files[0]
        with damage_in(file):
            groups = _first(self._settings, _STATES, file)["param_groups"]
            # A list of names per partition: of a group, or, in stage 3, of a sub-group.
            names = [list(of_partition) for of_partition in self._model.get("param_shapes") or []]
            if sorted(n for group in groups for n in group["params"]) != list(range(len(names))):
                return []
            named = [
                {**group, "params": [name for n in group["params"] for name in names[n]]}
                for group in groups
            ]
        place_of = {name: place for place, name in enumerate(self._model.get("module") or {})}
        for group in named:
            # DeepSpeed's engines have them in the order of their sizes.
            if group.get("use_muon") and place_of.keys() >= set(group["params"]):
                group["params"].sort(key=place_of.__getitem__)
        return named

    def tensors(self) -> dict[str, Callable[[], Tensor]]:
        """See `Source`; of stage 3's partitioned parameters only the frozen ones."""
        buffers = self._model.get("buffer_names") or []
        found: dict[str, Callable[[], Tensor]] = {}
        for name, values in (self._model.get("module") or {}).items():
            if name in self._frozen_shapes:
                found[name] = partial(self._frozen, name)
            elif isinstance(values, Tensor) and (values.numel() or name in buffers):
                found[name] = partial(_itself, values)
        return found

    def tied(self) -> dict[str, str]:
        """See `Source`."""
        return self._model.get("shared_params") or {}

    def run(self) -> dict:
        """See `Source`."""
        return {key: value for key, value in self._model.items() if key not in _LAYOUT}

    def scaling(self) -> dict:
        """See `Source`."""
        zero = self._settings
        return {key: zero[key] for key in _SCALING if key in zero}

    def _frozen(self, name: str) -> Tensor:
        """Return a frozen parameter, of which each rank has saved a part, or the whole."""
        shape = torch.Size(self._frozen_shapes[name])
        parts = [model["frozen_param_fragments"][name].view(-1) for model in self._models]
        if parts[0].numel() == shape.numel():
            return parts[0].view(shape)
        whole = torch.cat(parts)
        if whole.numel() < shape.numel():
            raise ValueError(
                f"{self.path}: got {whole.numel()} elements of {name} in {len(parts)} files of "
                f"model states, expected {shape.numel()}"
            )
        return whole[: shape.numel()].view(shape)

    @property
    def _frozen_shapes(self) -> dict:
        return self._model.get("frozen_param_shapes") or {}

    @property
    def _model(self) -> dict:
        """The model states saved by the first rank; {} if there are none."""
        found = self._models[0] if self._models else {}
        return found if isinstance(found, dict) else {}

    @cached_property
    def _models(self) -> list:
        """The model states: of each rank in stage 3, else one."""
        found = {path: _MODEL_STATES.fullmatch(path.name) for path in self.path.iterdir()}
        files = {path: int(match[1] or 0) for path, match in found.items() if match}
        return [load(file, self.path) for file in sorted(files, key=files.__getitem__)]

    @cached_property
    def _settings(self) -> dict:
        """ZeRO's own state dict of the first rank, for what is the same on all."""
        return self._zero(self._files[0])

    def _zero(self, file: Path) -> dict:
        """Return ZeRO's own state dict in a file."""
        found = load(file, self.path)
        zero = found.get("optimizer_state_dict") if isinstance(found, dict) else None
        if not isinstance(zero, dict):
            raise ValueError(f"{file}: not a file of ZeRO's states: no optimizer_state_dict in it")
        return zero


def _of_partition(file: Path, state: dict, weights: object) -> Iterator[Fragment]:
    """Yield the fragments of a partition, one per piece of its segment table."""
    with damage_in(file):
        state = with_moments(state)
        stores = _stores(state)
        step = checked_step(state)
        memory = checked_memory(algorithm_called(stores[0].rule.algorithm), state)
        table = stores[0].table
        weights = _checked_weights(weights, table)
        correction = state.get("param_correction")
        if correction is not None:
            check_entry("param_correction", correction, table.numel, [torch.int8])
    model, _ = _ranks(file)
    part = f"mp_rank_{model:02d}/" if model else ""
    for number, piece in enumerate(table.pieces):
        here = slice(piece.start, piece.start + piece.numel)
        yield Fragment(
            part + piece.name,
            file,
            step,
            memory,
            tuple(of_piece(store, number) for store in stores),
            None if weights is None else weights[here],
            None if correction is None else correction.reshape(-1)[here],
        )


def _checked_weights(weights: object, table: PieceTable) -> Tensor | None:
    """Return the master weights of a partition, with or without its padding; None if absent."""
    if not isinstance(weights, Tensor) or weights.numel() == 0:
        return None
    end = max((piece.start + piece.numel for piece in table.pieces), default=0)
    if not end <= weights.numel() <= table.numel:
        raise ValueError(
            f"got {weights.numel()} master weights, expected {table.numel}, or {end} without "
            "padding"
        )
    return weights.view(-1)


def _itself(values: Tensor) -> Tensor:
    return values


def _stores(state: dict) -> list[MomentStore]:
    """Return the checked moments of a partition, in the order of its algorithm."""
    moments = moments_in(state)
    algorithms = {one.store.rule.algorithm for one in moments.values()}
    rules = algorithm_called(*algorithms).moments if len(algorithms) == 1 else ()
    if not rules or not moments.keys() >= {rule.name for rule in rules}:
        raise ValueError(
            f"got a state with entries {shown_keys(state)}, expected all 8-bit moments of one "
            "algorithm; was it saved by another optimizer?"
        )
    stores = [moments[rule.name].store for rule in rules]
    for store, rule in zip(stores, rules, strict=True):
        store.check()
        if (store.table, store.codec, store.rule) != (stores[0].table, stores[0].codec, rule):
            raise ValueError("its moments are of different elements")
    return stores


def _stage(found: object) -> int | None:
    """Return ZeRO's stage, an enum that is pickled by number, by Python 3.11.0 to 3 by name."""
    if isinstance(found, Inert) and found.args:
        found = found.args[-1]
    if found in _STAGES:
        return _STAGES.index(found)
    return found if isinstance(found, int) else None


def _ranks(path: Path) -> tuple[int, int]:
    data, model = map(int, STATES.fullmatch(path.name).groups())
    return model, data


def _first(found: dict, names: Collection[str], file: Path) -> object:
    for name in names:
        if name in found:
            return found[name]
    raise ValueError(f"{file}: got entries {shown_keys(found)}, without one of {sorted(names)}")
