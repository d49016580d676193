# SPDX-License-Identifier: Apache-2.0
"""The joined contents of a checkpoint, which the writers of other checkpoints take."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from tqdm import tqdm

from zero8.checkpoint.read.fragment import Fragment
from zero8.checkpoint.read.joined import Empty, joined
from zero8.checkpoint.read.source import Source
from zero8.spec.adam import ADAM
from zero8.spec.algorithm import Algorithm
from zero8.spec.muon import MUON


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint, independent of frameworks.

    Attributes:
        source: where they are from, which has more on the run.
        parameters: the parameters that have moments, by name.
        groups: options of the parameter groups, each with the names of its "params".
        is_named: whether these are names, not numbers in constructor order.
        model: the model's tensors by name; master weights if there are any.
        release: takes what has been read and written out of memory (`zero8.files.inside.release`).
        notes: messages on contents that a conversion drops.
    """

    source: Source
    parameters: dict[str, Fragment]
    groups: list[dict]
    is_named: bool
    model: dict[str, Tensor]
    release: Callable[[], None]
    notes: list[str] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """The parameters' names in the order of the groups."""
        return [name for group in self.groups for name in group["params"]]

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm of the optimizer; Muon if AdamW steps what is no matrix."""
        found = {parameter.algorithm for parameter in self.parameters.values()}
        return MUON if MUON in found else found.pop()

    def algorithm_of(self, name: str) -> Algorithm:
        """Return the algorithm that steps a parameter, which may have no moments yet."""
        if name in self.parameters:
            return self.parameters[name].algorithm
        (group,) = (group for group in self.groups if name in group["params"])
        return ADAM if group.get("use_muon") is False else self.algorithm

    def settings(self, group: dict) -> dict:
        """Return the options of a group without its parameters."""
        return {k: v for k, v in group.items() if k not in ("params", "param_names")}

    def step(self) -> int:
        """Return the step of all parameters; raise ValueError if they differ."""
        steps = {parameter.step: name for name, parameter in self.parameters.items()}
        if len(steps) > 1:
            (low, one), (high, other) = min(steps.items()), max(steps.items())
            raise ValueError(
                f"{one} has taken {low} steps and {other} {high}, expected one number: ZeRO counts "
                "the steps of all parameters together"
            )
        return next(iter(steps))

    def check_is_named(self) -> None:
        """Raise ValueError unless the checkpoint has the parameters' names."""
        if not self.is_named:
            raise ValueError(
                "the checkpoint has numbers for its parameters, expected names: make the optimizer "
                "from model.named_parameters(), load the checkpoint, and save it again"
            )

    def note_corrections(self, where: str) -> None:
        """Add a note on the corrections of bfloat16 weights, if there are any."""
        if any(parameter.correction is not None for parameter in self.parameters.values()):
            self.notes.append(f"corrections of bfloat16 weights: {where}")


def read(source: Source, empty: Empty, decoded: bool, release: Callable[[], None]) -> Contents:
    """Return the contents of a checkpoint, in tensors of `empty`; moments in 8 bits or decoded.

    Raises ValueError if something is missing, there twice, or does not fit together.
    """
    parameters = {}
    for name in tqdm(source.names, desc="read", unit="parameter", disable=None):
        parameters[name] = joined(source.fragments(name), empty, decoded=decoded)
        release()
    if not parameters:
        raise ValueError(f"{source.path}: got no states; was it saved before the first step?")
    groups = source.groups()
    _tell_muons(parameters, groups)
    found = {p.algorithm: name for name, p in parameters.items()}
    if len(found) > 1 and found.keys() != {MUON, ADAM}:
        states = ", ".join(f"{one.name} of {name}" for one, name in found.items())
        raise ValueError(f"{source.path}: got states of several algorithms: {states}")
    _check_groups(source, parameters, groups)
    is_named = source.kind != "plain" or _are_named(groups)
    model = _model(source, parameters, empty)
    release()
    return Contents(source, parameters, groups, is_named, model, release)


def _tell_muons(parameters: dict[str, Fragment], groups: list[dict]) -> None:
    """Mark Muon's moments in fp32, which look like SGD's; its groups have settings of their own."""
    for group in groups:
        if group.get("use_muon", "ns_steps" in group):
            for name in parameters.keys() & set(group["params"]):
                if parameters[name].is_of_fp32:
                    parameters[name] = parameters[name].of(MUON)


def _check_groups(source: Source, parameters: dict[str, Fragment], groups: list[dict]) -> None:
    """Raise ValueError unless every parameter with a state is in exactly one group."""
    counts = Counter(name for group in groups for name in group["params"])
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ValueError(f"{source.path}: got {twice[:3]} in two parameter groups")
    is_zero = source.kind == "zero"
    if strangers := [name for name in parameters if name not in counts]:
        hint = "; are the files of model states there, and of one model-parallel rank alone?"
        raise ValueError(
            f"{source.path}: got states of {strangers[:3]}, which are in no parameter group"
            f"{hint * is_zero}"
        )
    # ZeRO has a state for every parameter of its groups.
    if missing := [name for name in counts if is_zero and name not in parameters]:
        raise ValueError(
            f"{source.path}: got no state of {missing[:3]}; expected it in one of "
            f"{[file.name for file in source.files]}.  Is a rank's file missing?"
        )


def _are_named(groups: list[dict]) -> bool:
    return all(
        "param_names" in group or not all(name.isdigit() for name in group["params"])
        for group in groups
        if group["params"]
    )


def _model(source: Source, parameters: dict[str, Fragment], empty: Empty) -> dict[str, Tensor]:
    """Return the model's tensors by name, preferring the weights stored with the moments."""
    tied, found = source.tied, {}
    readers = source.tensors
    for name in tqdm([*readers, *tied, *parameters], desc="model", unit="tensor", disable=None):
        owner = tied.get(name, name)
        if name in found:
            continue
        if owner in parameters and (weights := parameters[owner].weights) is not None:
            found[name] = weights.view(parameters[owner].shape)
        elif name in readers:
            values = readers[name]().detach()
            found[name] = empty(tuple(values.shape), dtype=values.dtype).copy_(values)
    return found


def weights_of(contents: Contents, name: str) -> Tensor:
    """Return the weights of a parameter in float32, with their corrections applied, if any."""
    parameter = contents.parameters.get(name)
    weights = parameter.corrected_weights() if parameter else None
    weights = contents.model.get(name) if weights is None else weights
    if weights is None:
        raise ValueError(
            f"{name}: got no weights in the checkpoint, expected the model's besides the states of "
            "the optimizer"
        )
    if parameter and weights.numel() != parameter.piece.numel:
        raise ValueError(
            f"{name}: got weights of shape {tuple(weights.shape)}, its moments have "
            f"{parameter.shape}"
        )
    return weights.to(torch.float32)
