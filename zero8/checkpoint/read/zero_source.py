# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of DeepSpeed's ZeRO: the folder of a tag, with a file of states per rank."""

import re
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from zero8.checkpoint.read.fragment import Fragment, of_piece
from zero8.checkpoint.read.inert import Inert
from zero8.checkpoint.read.safe_load import damage_in, load
from zero8.checkpoint.read.source import Source, in_threads
from zero8.deepspeed.layout import MASTERS
from zero8.deepspeed.moment_tensor import moments_in, with_moments
from zero8.spec.algorithms import algorithm_called
from zero8.spec.buffers import check_entry
from zero8.spec.shown import shown, shown_keys
from zero8.state.memory import checked_memory
from zero8.state.plain import checked_step
from zero8.state.store import MomentStore
from zero8.state.table import PieceTable

STATES = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL_STATES = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_00_model_states\.pt")
# Names of our state dict within ZeRO's.
_STATES = ("base_optimizer_state", "optimizer_state_dict")

# What an engine saves of the model and its layout; all else is of the run, or of the script.
_LAYOUT = {
    *("module", "buffer_names", "optimizer", "param_shapes", "shared_params"),
    *("frozen_param_shapes", "frozen_param_fragments", "ds_config", "ds_version"),
    *("dp_world_size", "mp_world_size"),
}
_SCALING = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")


def read_zero(folder: Path) -> Source:
    """Return the checkpoint in the folder of a tag."""
    files = sorted((path for path in folder.iterdir() if STATES.fullmatch(path.name)), key=_ranks)
    models = _model_states(folder)
    model = models[0] if models else {}

    def fragments_of(file: Path) -> list[Fragment]:
        with damage_in(file):
            return list(_fragments_in(file, folder))

    fragments: dict[str, list[Fragment]] = {}
    for _, found in in_threads("read", files, fragments_of):
        for fragment in found:
            fragments.setdefault(fragment.name, []).append(fragment)
    zero = _zero(files[0], folder)  # of what is the same on all ranks
    return Source(
        kind="zero",
        path=folder,
        files=files,
        names=list(fragments),
        fragments=fragments.__getitem__,
        groups=lambda: _groups(files[0], zero, model),
        tensors=_tensors(folder, models),
        world_size=1 + max(rank for _, rank in map(_ranks, files)),
        stage=_stage(zero.get("zero_stage")),
        tied=model.get("shared_params") or {},
        run={key: value for key, value in model.items() if key not in _LAYOUT},
        scaling={key: zero[key] for key in _SCALING if key in zero},
    )


def _model_states(folder: Path) -> list[dict]:
    """Return the model states: of each rank in stage 3, else one; [] without their files."""
    found = {path: _MODEL_STATES.fullmatch(path.name) for path in folder.iterdir()}
    ranks = {path: int(match[1] or 0) for path, match in found.items() if match}
    return [_dict_in(file, folder) for file in sorted(ranks, key=ranks.__getitem__)]


def _dict_in(file: Path, folder: Path) -> dict:
    found = load(file, folder)
    if not isinstance(found, dict):
        raise ValueError(f"{file}: got {shown(found)}, expected a dict of DeepSpeed's")
    return found


def _zero(file: Path, folder: Path) -> dict:
    """Return ZeRO's own state dict in a file."""
    zero = _dict_in(file, folder).get("optimizer_state_dict")
    if not isinstance(zero, dict):
        raise ValueError(f"{file}: not a file of ZeRO's states: no optimizer_state_dict in it")
    return zero


def _fragments_in(file: Path, folder: Path) -> Iterator[Fragment]:
    """Yield the fragments of a file of states."""
    zero = _zero(file, folder)
    states = _first(zero, _STATES, file)["state"]
    for number, weights in enumerate(_first(zero, MASTERS, file)):
        if state := states.get(number):
            yield from _of_partition(file, state, weights)


def _groups(file: Path, zero: dict, model: dict) -> list[dict]:
    """Return the groups with names in the order of the model; [] if its file does not fit."""
    with damage_in(file):
        groups = _first(zero, _STATES, file)["param_groups"]
        # A list of names per partition: of a group, or, in stage 3, of a sub-group.
        names = [list(of_partition) for of_partition in model.get("param_shapes") or []]
        if sorted(n for group in groups for n in group["params"]) != list(range(len(names))):
            return []
        named = [
            {**group, "params": [name for n in group["params"] for name in names[n]]}
            for group in groups
        ]
    place_of = {name: place for place, name in enumerate(model.get("module") or {})}
    for group in named:
        # DeepSpeed's engines have them in the order of their sizes.
        if group.get("use_muon") and place_of.keys() >= set(group["params"]):
            group["params"].sort(key=place_of.__getitem__)
    return named


def _tensors(folder: Path, models: list[dict]) -> dict[str, Callable[[], Tensor]]:
    """Return what reads tensors; of stage 3's partitioned parameters only of the frozen ones."""
    if not models:
        return {}
    buffers = models[0].get("buffer_names") or []
    frozen = models[0].get("frozen_param_shapes") or {}
    found: dict[str, Callable[[], Tensor]] = {}
    for name, values in (models[0].get("module") or {}).items():
        if name in frozen:
            found[name] = partial(_frozen, folder, name, torch.Size(frozen[name]), models)
        elif isinstance(values, Tensor) and (values.numel() or name in buffers):
            found[name] = values.detach
    return found


def _frozen(folder: Path, name: str, shape: torch.Size, models: list[dict]) -> Tensor:
    """Return a frozen parameter, of which each rank has saved a part, or the whole."""
    parts = [model["frozen_param_fragments"][name].view(-1) for model in models]
    if parts[0].numel() == shape.numel():
        return parts[0].view(shape)
    whole = torch.cat(parts)
    if whole.numel() < shape.numel():
        raise ValueError(
            f"{folder}: got {whole.numel()} elements of {name} in {len(parts)} files of model "
            f"states, expected {shape.numel()}"
        )
    return whole[: shape.numel()].view(shape)


def _of_partition(file: Path, state: dict, weights: object) -> Iterator[Fragment]:
    """Yield the fragments of a partition, one per piece of its segment table."""
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
    """Return ZeRO's stage, an enum that is pickled by number; None where it is not."""
    (number,) = found.args if isinstance(found, Inert) and len(found.args) == 1 else (None,)
    return number if isinstance(number, int) else None


def _ranks(path: Path) -> tuple[int, int]:
    data, model = map(int, STATES.fullmatch(path.name).groups())
    return model, data


def _first(found: dict, names: Collection[str], file: Path) -> object:
    for name in names:
        if name in found:
            return found[name]
    raise ValueError(f"{file}: got entries {shown_keys(found)}, without one of {sorted(names)}")
