# SPDX-License-Identifier: Apache-2.0
"""Reads pickles as data: nothing that they name is imported, called or changed.

A pickle is a program: it can call any function by name, set attributes of classes, and allocate any
number of bytes.  Here classes, functions and the objects made by them become `Inert` placeholders,
except for the few makers that the caller gives.  Memory and time are of the order of the pickle's
length.

Why not other unpicklers: the C `pickle.Unpickler` allocates by the numbers of its memo, and sets
attributes of the classes and functions that it finds; torch's for `weights_only` calls `bytearray`
and `torch.Tensor` with any number; and both crash when they hash deeply nested tuples.
"""

import io
import pickle
from collections.abc import Callable, Mapping

Maker = Callable[..., object]

MAX_NAME_CHARACTERS = 1000
MAX_ARGS = 16
"""The most arguments of a maker: a pickle can repeat a call with a long list at little cost."""
_NAMES_OF_PYTHON_2 = {"__builtin__": "builtins", "copy_reg": "copyreg"}
"""Names of modules in protocol 2, and in Python 3."""


class Inert:
    """A placeholder for a class, a function, or an object that is not needed to read states.

    Attributes:
        name: of the class or function, as `module.name`.
        args: the arguments of its construction; None for the class or function itself.
        state: the state that would have set its attributes.
        items: the items that would have been added to it.
    """

    def __init__(self, name: str, args: tuple | None = None):
        """Make a placeholder without state and items."""
        self.name, self.args, self.state = name, args, None
        self.items: list = []

    def __repr__(self) -> str:
        """Return the name only."""
        return f"<{self.name}>"


class SafePickle(pickle._Unpickler):
    """An unpickler in Python; `load` returns the pickled object."""

    def __init__(
        self, data: bytes, makers: Mapping[str, Maker], storage: Callable[[tuple], object]
    ):
        """Read a pickle.

        Args:
            data: its bytes.
            makers: by name, the functions to call; others become `Inert`.
            storage: returns the object for a persistent id.
        """
        super().__init__(io.BytesIO(data))
        self._makers, self._storage = makers, storage

    def find_class(self, module: str, name: str) -> Inert:
        """Return the placeholder of a class or function."""
        if len(module) + len(name) > MAX_NAME_CHARACTERS:
            raise pickle.UnpicklingError("got the name of a class that is too long")
        return Inert(f"{_NAMES_OF_PYTHON_2.get(module, module)}.{name}")

    def persistent_load(self, pid: object) -> object:
        """Return a storage."""
        return self._storage(pid)

    def make(self, what: object, args: object) -> object:
        """Return the result of a call: that of the maker, or a placeholder."""
        if not (isinstance(what, Inert) and what.args is None and isinstance(args, tuple)):
            raise pickle.UnpicklingError("it calls something that is not a class or function")
        if what.name == "torch._tensor._rebuild_from_type_v2":
            maker, kind, args, state = args
            if isinstance(maker, Inert) and maker.name == "torch._utils._rebuild_wrapper_subclass":
                return _subclass(kind, state)
            return self.make(maker, args)  # a tensor with attributes, which are dropped
        maker = self._makers.get(what.name)
        if maker is None:
            return Inert(what.name, args)
        if len(args) > MAX_ARGS:
            raise pickle.UnpicklingError(f"it calls {what.name} with {len(args)} arguments")
        return maker(*args)

    def _call(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = self.make(self.stack[-1], args)

    def _call_with_keywords(self) -> None:
        self.stack.pop()
        self._call()

    def _set_state(self) -> None:
        state = self.stack.pop()
        built = self.stack[-1]
        if isinstance(built, Inert) and built.args is not None:
            built.state = state
        elif not isinstance(built, dict):
            raise pickle.UnpicklingError("it sets attributes of an object that it has not made")

    def _append(self) -> None:
        item = self.stack.pop()
        self._extend([item])

    def _appends(self) -> None:
        self._extend(self.pop_mark())

    def _extend(self, items: list) -> None:
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(items)
        elif isinstance(target, Inert):
            target.items.extend(items)
        else:
            raise pickle.UnpicklingError("it appends to something that is not a list")

    def _set_item(self) -> None:
        item = self.stack.pop()
        self._update([self.stack.pop(), item])

    def _set_items(self) -> None:
        self._update(self.pop_mark())

    def _update(self, items: list) -> None:
        target = self.stack[-1]
        if isinstance(target, dict) and len(items) % 2 == 0:
            for key in items[::2]:
                check_key(key)
            target.update(zip(items[::2], items[1::2], strict=True))
        elif not isinstance(target, Inert):
            raise pickle.UnpicklingError("it sets items of something that is not a dict")

    def _empty_set(self) -> None:
        self.append(Inert("builtins.set", ()))

    def _frozen_set(self) -> None:
        self.append(Inert("builtins.frozenset", (self.pop_mark(),)))

    # The opcodes of protocols 2 to 5 that torch writes; all others raise.
    dispatch = {
        getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]]
        for name in (
            *("PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK"),
            *("NONE", "NEWTRUE", "NEWFALSE", "BINFLOAT"),
            *("BININT", "BININT1", "BININT2", "LONG1", "LONG4"),
            *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
            *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
            *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "EMPTY_DICT"),
            *("GLOBAL", "STACK_GLOBAL", "BINPERSID"),
            *("BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET"),
        )
    } | {
        pickle.REDUCE[0]: _call,
        pickle.NEWOBJ[0]: _call,
        pickle.NEWOBJ_EX[0]: _call_with_keywords,
        pickle.BUILD[0]: _set_state,
        pickle.APPEND[0]: _append,
        pickle.APPENDS[0]: _appends,
        pickle.ADDITEMS[0]: _appends,
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: _set_items,
        pickle.EMPTY_SET[0]: _empty_set,
        pickle.FROZENSET[0]: _frozen_set,
    }


def _subclass(kind: object, state: object) -> Inert:
    """Return the placeholder of a tensor that holds others, which are in its `state`."""
    if not isinstance(kind, Inert) or kind.args is not None:
        raise pickle.UnpicklingError("it makes a tensor of something that is not a class")
    made = Inert(kind.name, ())
    made.state = state
    return made


def check_key(key: object) -> None:
    """Raise UnpicklingError for keys other than text, small integers, None and `Inert`."""
    # Hashing nested tuples overflows the stack; large integers can be crafted to collide.
    if isinstance(key, str | Inert) or key is None:
        return
    if isinstance(key, int) and abs(key) < 2**60:
        return
    raise pickle.UnpicklingError("got a key of a dict that is neither text nor a number")
