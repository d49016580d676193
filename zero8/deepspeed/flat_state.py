# SPDX-License-Identifier: Apache-2.0
"""The kind of state of a flat ZeRO partition: `MomentTensor`s, which DeepSpeed treats as dense.

Entries:

    step      int, steps taken
    MEMORY    floats of the algorithm (`zero8.state.memory`)
    MOMENT    `MomentTensor` over the partition's segment table, one per moment of the algorithm
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from zero8.deepspeed.moment_tensor import MomentTensor, has_moments, with_moments
from zero8.deepspeed.nvme import beside
from zero8.deepspeed.partition import group_of, table_of
from zero8.environment.ranks import Group
from zero8.spec.algorithm import Algorithm, MomentRule
from zero8.spec.codec import Codec
from zero8.spec.shown import shown_keys
from zero8.state.kind import Contents, StateKind
from zero8.state.memory import checked_memory, new_memory, unknown_memory
from zero8.state.params import KnownParams, ParamInfo
from zero8.state.plain import checked_dense, checked_step
from zero8.state.settings import Settings
from zero8.state.store import MomentStore
from zero8.state.table import Piece, PieceTable
from zero8.state.tell import tell_of_reencoding


class FlatPartition(StateKind):
    """The state of a rank's partition of a flat buffer, which ZeRO steps instead of parameters."""

    raises_alone = False  # gradients differ between ranks, which wait for each other in collectives
    wraps_tensors = True

    def __init__(self, settings: Settings, params: KnownParams):
        """See `StateKind`."""
        super().__init__(settings, params)
        self._tables = WeakTensorKeyDictionary()  # by partition; tables never change

    def serves(self, p: Tensor, state: dict) -> bool:
        """See `StateKind`."""
        if p in self._params:
            return False
        # A copied optimizer does not know its partitions; its states identify them.
        return has_moments(state) or self.table(p) is not None

    def table(self, p: Tensor) -> PieceTable | None:
        """Return the segment table of a partition, None if ZeRO does not know it as one."""
        known = self._params.alive()

        def piece(q: Tensor, start: int, numel: int, first: int) -> Piece:
            return self.settings.piece(known[q], start, numel, first)

        table = table_of(p, list(known), piece)
        if table is not None and table.pieces:
            self._tables[p] = table
        # DeepSpeed's offload_states removes the tensors that `table_of` reads.
        return None if table is None else self._tables.get(p, table)

    def process_group(self, p: Tensor) -> Group:
        """See `StateKind`; a partition's parameters are cut among the same ranks."""
        return group_of(p, list(self._params.alive()))

    def new(self, p: Tensor, info: ParamInfo | None) -> dict:
        """See `StateKind`."""
        algorithm, codec, table = self.settings.algorithm, self.settings.codec, self.table(p)
        stores = [MomentStore.zeros(codec, rule, table, p.device) for rule in algorithm.moments]
        moments = _moments_of([_placed(p, store) for store in stores])
        return {"step": 0, **new_memory(algorithm), **moments}

    def moments(self, p: Tensor, state: dict, info: ParamInfo | None) -> list[MomentStore]:
        """See `StateKind`; dense moments come from universal checkpoints and fp32 optimizers."""
        if "format" in state:
            raise ValueError(
                "got the state of a whole parameter for a ZeRO partition of "
                f"{p.numel()} elements; was the checkpoint saved without ZeRO?"
            )
        algorithm, table = self.settings.algorithm, self.table(p)
        state |= with_moments(state)  # of an optimizer that was pickled as a whole
        _check_has_moments(algorithm, state)
        like = None if table is None else (self.settings.codec, table)
        found: dict[str, MomentStore] = {}
        for rule in _quantized(algorithm, state):
            store = _store_of(rule, state[rule.name])
            check_places(store.table, table or replace(store.table, numel=p.numel()))
            found[rule.name], like = store, (store.codec, store.table)
        arrived = [
            _encoded(algorithm, p, rule, state[rule.name], like, check_values=self.raises_alone)
            for rule in algorithm.moments
            if rule.name not in found
        ]
        found |= {store.name: store for store in arrived}
        stores = [found[name] for name in algorithm.moment_names]
        _check_alike(stores)
        if "step" in state:
            state["step"] = checked_step(state)
        if arrived:
            state |= _moments_of(arrived)
        if any(store.written for store in stores):
            state |= unknown_memory(algorithm)
            for store in stores:
                store.written = False
        return stores

    def adopted(self, p: Tensor, saved: dict, info: ParamInfo | None) -> dict:
        """See `StateKind`."""
        algorithm, table = self.settings.algorithm, self.table(p)
        saved = with_moments(saved)
        if algorithm.step_if_unknown is not None:
            saved = {"step": algorithm.step_if_unknown, **saved}
        _check_has_moments(algorithm, saved, "step")
        numbers = {"step": checked_step(saved), **unknown_memory(algorithm)}
        quantized = _quantized(algorithm, saved)
        if len(quantized) == len(algorithm.moments):
            _check_has_moments(algorithm, saved, *new_memory(algorithm))
            numbers |= checked_memory(algorithm, saved)
        like = self.settings.codec, table
        stores = [
            _placed(p, self._fitted(rule, saved[rule.name], table).to(p.device))
            if rule in quantized
            else _encoded(algorithm, p, rule, saved[rule.name], like)
            for rule in algorithm.moments
        ]
        correction = self.settings.correction_from(p, saved)
        correction = {key: beside(p, value) for key, value in correction.items()}
        return {**numbers, **_moments_of(stores), **correction}

    def _fitted(self, rule: MomentRule, moment: MomentTensor, table: PieceTable) -> MomentStore:
        """Return a saved moment over this partition's table, verbatim if codec and blocks agree."""
        saved, codec = _store_of(rule, moment), self.settings.codec
        saved.check_values()
        check_places(saved.table, table)
        # The checkpoint's identities continue its dither.
        pairs = list(zip(table.pieces, saved.table.pieces, strict=True))
        pieces = tuple(replace(ours, identity=theirs.identity) for ours, theirs in pairs)
        wanted = PieceTable(pieces, table.numel)
        same_blocks = all(ours.block_size == theirs.block_size for ours, theirs in pairs)
        if same_blocks and saved.codec == codec:
            return replace(saved.clone(), table=wanted)
        if rule == self.settings.algorithm.moments[0]:
            for ours, theirs in pairs:
                kept = codec, ours.block_size
                tell_of_reencoding((saved.codec, theirs.block_size), kept)
        store = MomentStore.zeros(codec, rule, wanted)
        store.write(0, saved.read(0, table.numel))
        return store

    def contents(self, state: dict) -> Contents:
        """See `StateKind`."""
        described: list[object] = list(state)
        entries = []
        for value in state.values():
            if isinstance(value, MomentTensor):
                store = value.store
                described.append((store.table, store.codec.number, store.written))
                entries += store.buffers
            elif isinstance(value, Tensor):
                entries.append(value)
        return described, entries


def check_places(saved: PieceTable, table: PieceTable) -> None:
    """Raise ValueError unless a saved segment table has the same ranges of parameters."""
    places = [[(q.start, q.numel, q.first, q.shape) for q in t.pieces] for t in (saved, table)]
    if places[0] != places[1] or saved.numel != table.numel:
        equal = [got == expected for got, expected in zip(*places, strict=False)]
        first = [*equal, False].index(False)
        raise ValueError(
            "the checkpoint's partition holds other ranges of parameters than this one: got "
            f"{_shown_from(first, saved)}, expected {_shown_from(first, table)}; was it saved by "
            "another model, or of other trained parameters? For another world size or ZeRO stage, "
            "convert it first: zero8 checkpoint convert DIR OUT --to zero"
        )


def _shown_from(number: int, table: PieceTable) -> str:
    """Return a description of the pieces of a table from this one on."""
    shown = [f"{q.numel} of {q.name} of {q.shape} at {q.start}" for q in table.pieces[number:][:3]]
    return f"{', '.join(shown) or 'nothing more'} in {table.numel} elements"


def _moments_of(stores: Sequence[MomentStore]) -> dict:
    """Return the state's entries for these moments."""
    return {store.name: MomentTensor(store) for store in stores}


def _quantized(algorithm: Algorithm, state: dict) -> list[MomentRule]:
    """Return the moments that are 8-bit in a state."""
    return [rule for rule in algorithm.moments if isinstance(state[rule.name], MomentTensor)]


def _encoded(
    algorithm: Algorithm,
    p: Tensor,
    rule: MomentRule,
    values: Tensor,
    like: tuple[Codec, PieceTable] | None,
    *,
    check_values: bool = True,
) -> MomentStore:
    """Return a dense moment encoded as `like`: by this codec, over this segment table."""
    values = checked_dense(rule, "a ZeRO partition", values, check_values=check_values)
    if like is None:
        raise ValueError(
            f"state of a parameter of {p.numel()} elements: got {rule.name} without format, "
            f"expected a state of {algorithm.class_name} (load_state_dict reads those of "
            f"{algorithm.fp32_name} too)"
        )
    if values.numel() != p.numel():
        raise ValueError(
            f"state of a ZeRO partition of {p.numel()} elements: got {rule.name} of "
            f"{values.numel()}; was the checkpoint saved by another model or world size?"
        )
    codec, table = like
    store = MomentStore.zeros(codec, rule, table, p.device)
    store.write(0, values.reshape(-1))
    return _placed(p, store)


def _placed(p: Tensor, store: MomentStore) -> MomentStore:
    """Return a new store where its partition is: in memory, or on a disk."""
    return store.with_buffers(partial(beside, p))


def _check_has_moments(algorithm: Algorithm, state: dict, *others: str) -> None:
    if missing := [key for key in (*others, *algorithm.moment_names) if key not in state]:
        raise ValueError(
            f"state of a ZeRO partition: got entries {shown_keys(state)}, without {missing}; was "
            "the checkpoint saved without ZeRO?"
        )


def _store_of(rule: MomentRule, moment: MomentTensor) -> MomentStore:
    """Return the store of a moment; raises ValueError if it is a view, or does not fit."""
    if moment.store.rule != rule or not moment.is_whole:
        raise ValueError(
            f"{rule.name} of a ZeRO partition: got {moment!r}, expected the whole {rule.name}"
        )
    moment.store.check()
    return moment.store


def _check_alike(stores: Sequence[MomentStore]) -> None:
    """Raise ValueError unless all moments have the same codec and blocks."""
    first = stores[0]
    expected = first.codec.name, first.table.places
    for store in stores[1:]:
        if (got := (store.codec.name, store.table.places)) != expected:
            raise ValueError(
                f"{store.name} of a ZeRO partition: got codec {got[0]} over {got[1][:3]}..., "
                f"expected {expected[0]} over {expected[1][:3]}..., as {first.name} has"
            )
