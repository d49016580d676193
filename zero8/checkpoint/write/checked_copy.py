# SPDX-License-Identifier: Apache-2.0
"""Copies files of `torch.save` for unsafe readers, such that the copies cannot run code.

A file is read as data and written again, so that a copy holds only tensors, plain data and objects
of a few known classes.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from zero8.checkpoint.files.staging import save
from zero8.checkpoint.read.safe_load import damage_in, load
from zero8.checkpoint.read.safe_pickle import Inert, check_key

Restore = Callable[[tuple, dict], object]


TRUST = "if you trust the file's author, --trust lets DeepSpeed read it, which can run code in it"
_SETS = {"builtins.set": set, "builtins.frozenset": frozenset}


class CheckedCopy:
    """Copies files.

    Attributes:
        restore: by name of a class, a function that makes an object from arguments and attributes.
        constants: by pickled name, objects that are neither made nor called.
        check: raises ValueError to refuse the content of a file.
    """

    def __init__(
        self,
        restore: Mapping[str, Restore],
        constants: Mapping[str, object],
        check: Callable[[object], None],
    ):
        """Set the attributes."""
        self.restore, self.constants, self.check = restore, constants, check

    def copy(self, source: Path, target: Path) -> None:
        """Copy the files `*.pt` of a folder into another, which must be empty.

        Raises:
            ValueError: naming the file, if it is damaged or a link, or holds an object of another
                class, which the message names.
            OSError: if a file cannot be read or written.
        """
        for path in sorted(source.glob("*.pt")):
            found = load(path, source)
            with damage_in(path):
                content = _Restored(self).of(found)
                self.check(content)
                save(content, target / path.name)


class _Restored:
    """Replaces `Inert` placeholders by objects; shared objects stay shared."""

    def __init__(self, known: CheckedCopy):
        self._known = known
        self._made: dict[int, tuple[object, object]] = {}

    def of(self, found: object) -> object:
        """Return the object itself; raises ValueError if its class is not known."""
        if isinstance(found, Inert | dict | list | tuple):
            if id(found) not in self._made:
                self._make(found)
            return self._made[id(found)][1]
        return found

    def _make(self, found: Inert | dict | list | tuple) -> None:
        if isinstance(found, Inert):
            self._keep(found, self._object(found))
        elif isinstance(found, dict):
            made = self._keep(found, type(found)())
            made.update((self.of(key), self.of(value)) for key, value in found.items())
        elif isinstance(found, list):
            made = self._keep(found, [])
            made.extend(map(self.of, found))
        else:
            self._keep(found, type(found)(map(self.of, found)))

    def _keep(self, found: object, made):
        self._made[id(found)] = found, made  # keeps `found` alive, and its id unique
        return made

    def _object(self, found: Inert) -> object:
        if found.args is None and found.name in self._known.constants:
            return self._known.constants[found.name]
        if found.name in _SETS and found.args is not None:
            return _SETS[found.name](self._members(found))
        restore = self._known.restore.get(found.name)
        if restore is None or found.args is None:
            what = f"an object of {found.name}, which is not known to be harmless"
            raise ValueError(f"got {what}; {TRUST}")
        state = self.of(found.state)
        return restore(self.of(found.args), state if isinstance(state, dict) else {})

    def _members(self, found: Inert) -> list:
        """Return the members of a set: of its argument, and those added afterwards."""
        (members,) = found.args or ([],)
        if not isinstance(members, list | tuple):
            raise ValueError("got a set whose argument is not a list")
        members = [*members, *found.items]
        for member in members:
            check_key(member)
        return members
