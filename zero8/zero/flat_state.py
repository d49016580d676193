# SPDX-License-Identifier: Apache-2.0
"""The kind of state of a flat ZeRO partition: two `MomentTensor`s, which DeepSpeed takes for dense.

Entries:

    step                  int, steps taken
    history               float, bound on m^2/v (equation (S1) of zero8.spec.scalars)
    exp_avg, exp_avg_sq   `MomentTensor`, over the segment table of the partition
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from zero8.spec.codec import Codec
from zero8.spec.scalars import UNKNOWN_HISTORY
from zero8.spec.shown import shown_keys
from zero8.state.header import MOMENTS
from zero8.state.kind import Contents, StateKind
from zero8.state.params import KnownParams, ParamInfo
from zero8.state.plain import check_dense, checked_history, checked_step
from zero8.state.settings import Settings
from zero8.state.store import MomentStore
from zero8.state.table import Piece, PieceTable
from zero8.zero.moment_tensor import MomentTensor
from zero8.zero.partition import table_of


class FlatPartition(StateKind):
    """States of what ZeRO puts in the place of parameters: a rank's part of a flat buffer."""

    raises_alone = False  # ranks meet different gradients, and wait for each other in collectives

    def __init__(self, settings: Settings, params: KnownParams):
        """See `StateKind`."""
        super().__init__(settings, params)
        self._tables = WeakTensorKeyDictionary()  # of partitions; they never change

    def serves(self, p: Tensor, state: dict) -> bool:
        """See `StateKind`."""
        if p in self._params:
            return False
        # A copied optimizer does not know its partitions, so that its own states have to say.
        return bool(state and "format" not in state) or self.table(p) is not None

    def table(self, p: Tensor, numel: int | None = None) -> PieceTable | None:
        """Return the segment table of a partition, None if ZeRO does not know it as one.

        Args:
            p: the partition.
            numel: its number of elements if it is swapped out, and so has none.
        """
        known = self._params.alive()

        def piece(q: Tensor, start: int, numel: int, first: int) -> Piece:
            return self._settings.piece(known[q], start, numel, first)

        table = table_of(p, p.numel() if numel is None else numel, list(known), piece)
        if table is not None and table.pieces:
            self._tables[p] = table
        # While DeepSpeed's offload_states has taken away what says it, a partition looks empty.
        return None if table is None else self._tables.get(p, table)

    def new(self, p: Tensor, info: ParamInfo | None) -> dict:
        """See `StateKind`."""
        codec, table = self._settings.codec, self.table(p)
        stores = [MomentStore.zeros(codec, which, table, p.device) for which in MOMENTS]
        return _state_of(stores, step=0, history=0.0)

    def moments(self, p: Tensor, state: dict, info: ParamInfo | None) -> list[MomentStore]:
        """See `StateKind`; dense moments come from universal checkpoints and from fp32 Adams."""
        if "format" in state:
            raise ValueError(
                "got the state of a whole parameter for a ZeRO partition of "
                f"{p.numel()} elements; was the checkpoint saved without ZeRO?"
            )
        _check_has_moments(state)
        table = self.table(p)
        quantized = [which for which in MOMENTS if isinstance(state[which], MomentTensor)]
        like = None if table is None else (self._settings.codec, table)
        for which in quantized:
            store = _store_of(which, state[which])
            _check_fits(p, which, store.table, table)
            like = store.codec, store.table
        dense = [which for which in MOMENTS if which not in quantized]
        absorbed = {which: _absorbed(p, which, state[which], like) for which in dense}
        stores = [{**state, **absorbed}[which].store for which in MOMENTS]
        _check_alike(*stores)
        if dense:
            state |= absorbed | {"history": state.get("history", UNKNOWN_HISTORY)}
        return stores

    def adopted(self, p: Tensor, saved: dict, info: ParamInfo | None) -> dict:
        """See `StateKind`."""
        table = self.table(p)
        _check_has_moments(saved, "step")
        quantized = [which for which in MOMENTS if isinstance(saved[which], MomentTensor)]
        step, history = checked_step(saved), UNKNOWN_HISTORY
        if len(quantized) == len(MOMENTS):
            _check_has_moments(saved, "history")
            history = checked_history(saved)
        like = self._settings.codec, table
        stores = [
            self._fitted(which, saved[which], table).to(p.device)
            if which in quantized
            else _absorbed(p, which, saved[which], like).store
            for which in MOMENTS
        ]
        return _state_of(stores, step, history)

    def _fitted(self, which: str, moment: MomentTensor, table: PieceTable) -> MomentStore:
        """Return a saved moment over this partition's table: verbatim where the two agree."""
        saved, codec = _store_of(which, moment), self._settings.codec
        saved.check_values()
        check_places(saved.table, table)
        # The dither goes on where it was: identities come from the checkpoint.
        pairs = list(zip(table.pieces, saved.table.pieces, strict=True))
        pieces = tuple(replace(ours, identity=theirs.identity) for ours, theirs in pairs)
        wanted = PieceTable(pieces, table.numel)
        same_blocks = all(ours.block_size == theirs.block_size for ours, theirs in pairs)
        if same_blocks and saved.codec == codec:
            return replace(saved.clone(), table=wanted)
        saved.tell_if_retired()
        for ours, theirs in pairs if which == MOMENTS[0] else ():
            self.reencoded.note((saved.codec, theirs.block_size), (codec, ours.block_size))
        store = MomentStore.zeros(codec, saved.which, wanted)
        store.write(0, saved.read(0, table.numel))
        return store

    def contents(self, states: Sequence[dict]) -> Contents:
        """See `StateKind`."""
        descriptions, entries = [], []
        for state in states:
            described: list[object] = list(state)
            for value in state.values():
                if isinstance(value, MomentTensor):
                    store = value.store
                    described.append((store.table, store.codec.number))
                    entries += store.buffers
                elif isinstance(value, Tensor):
                    entries.append(value)
            descriptions.append(described)
        return descriptions, entries

    def note_writes(self, states: Sequence[dict]) -> None:
        """See `StateKind`."""
        for state in states:
            for which in MOMENTS:
                if state[which].store.written:
                    state["history"], state[which].store.written = UNKNOWN_HISTORY, False


def check_places(saved: PieceTable, table: PieceTable) -> None:
    """Raise ValueError if a saved segment table has other ranges of parameters than this one."""
    places = [[(q.start, q.numel, q.first, q.shape) for q in t.pieces] for t in (saved, table)]
    if places[0] != places[1] or saved.numel != table.numel:
        raise ValueError(
            "the checkpoint's partition holds other ranges of parameters than this one: got "
            f"{places[0][:3]}..., expected {places[1][:3]}...; was it saved by another model, "
            "world size or ZeRO stage? Convert it to a universal checkpoint first"
        )


def _state_of(stores: list[MomentStore], step: int, history: float) -> dict:
    exp_avg, exp_avg_sq = (MomentTensor(store) for store in stores)
    return {"step": step, "history": history, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}


def _absorbed(
    p: Tensor, which: str, values: Tensor, like: tuple[Codec, PieceTable] | None
) -> MomentTensor:
    """Return a moment that arrived in float32, encoded by a codec over a segment table."""
    check_dense(which, "a ZeRO partition", values)
    if like is None:
        raise ValueError(
            f"state of a parameter of {p.numel()} elements: got {which} without format, "
            "expected a state of Adam8bitBlockwise (load_state_dict reads those of an fp32 "
            "Adam too)"
        )
    if values.numel() != p.numel():
        raise ValueError(
            f"state of a ZeRO partition of {p.numel()} elements: got {which} of "
            f"{values.numel()}; was the checkpoint saved by another model or world size?"
        )
    codec, table = like
    store = MomentStore.zeros(codec, which, table, p.device)
    store.write(0, values.reshape(-1))
    return MomentTensor(store)


def _check_has_moments(state: dict, *others: str) -> None:
    if missing := [key for key in (*others, *MOMENTS) if key not in state]:
        raise ValueError(
            f"state of a ZeRO partition: got entries {shown_keys(state)}, without {missing}; was "
            "the checkpoint saved without ZeRO?"
        )


def _store_of(which: str, moment: MomentTensor) -> MomentStore:
    """Return the store of a moment that came from outside; raises ValueError if it is not whole."""
    if moment.store.which != which or not moment.is_whole:
        raise ValueError(f"{which} of a ZeRO partition: got {moment!r}, expected the whole {which}")
    moment.store.check()
    moment.compare_hash()
    return moment.store


def _check_fits(p: Tensor, which: str, table: PieceTable, wanted: PieceTable | None) -> None:
    """Raise ValueError unless a moment's table is one for this partition, as far as is known."""
    if table.numel != p.numel():
        raise ValueError(
            f"{which} of a ZeRO partition: got a moment of {table.numel} elements, expected "
            f"{p.numel()}"
        )
    if wanted is not None:
        check_places(table, wanted)


def _check_alike(exp_avg: MomentStore, exp_avg_sq: MomentStore) -> None:
    """Raise ValueError unless one description of blocks and codes holds for both moments."""
    got, expected = ((store.codec.name, store.table.places) for store in (exp_avg_sq, exp_avg))
    if got != expected:
        raise ValueError(
            f"exp_avg_sq of a ZeRO partition: got codec {got[0]} over {got[1][:3]}..., expected "
            f"{expected[0]} over {expected[1][:3]}..., as exp_avg has"
        )
