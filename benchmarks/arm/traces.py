# SPDX-License-Identifier: Apache-2.0
"""The instructions of an emulated step, one after the other, and the loops among them.

The step spends its time in two loops over chunks of four vectors: the first has the square roots of
Adam, the last one its divisions.  So a trace is cut at every fourth square root, and what occurs
most often between two cuts is one iteration of the loop, from one square root to the next fourth
one: branches that are not taken, calls and inner loops are as they were.
"""

import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.arm.machines import llvm_tool
from benchmarks.arm.programs import Program

VECTORS = 4
"""Of a chunk: kChunk of csrc/chunks.h."""

_EXECUTED = re.compile(r"Trace \d+: \S+ \[[0-9a-f]+/([0-9a-f]+)/")
_DISASSEMBLED = re.compile(r"\s*([0-9a-f]+):\s+(\S.*)$")


@dataclass(frozen=True)
class Loop:
    """One iteration of a loop.

    Attributes:
        addresses: of its instructions, in order.
        share: of all iterations, how many were exactly so.
    """

    addresses: tuple[int, ...]
    share: float


@dataclass(frozen=True)
class Trace:
    """A step of some blocks.

    Attributes:
        addresses: of all its instructions, in order.
        texts: the instruction at each address, as an assembler reads it.
    """

    addresses: Sequence[int]
    texts: Mapping[int, str]

    def matching(self, pattern: re.Pattern) -> list[int]:
        """Return where instructions of the hot code stand that match, as indices.

        What is executed less than half as often as the most frequent one is not hot.
        """
        wanted = {pc for pc in set(self.addresses) if pattern.match(self.texts[pc])}
        counts = Counter(pc for pc in self.addresses if pc in wanted)
        most = max(counts.values(), default=0)
        return [i for i, pc in enumerate(self.addresses) if 2 * counts.get(pc, 0) >= max(1, most)]

    def pieces(self, pattern: re.Pattern, every: int) -> list[tuple[int, ...]]:
        """Return the addresses between every so many instructions that match."""
        cuts = self.matching(pattern)[::every]
        pairs = zip(cuts, cuts[1:], strict=False)
        return [tuple(self.addresses[begin:end]) for begin, end in pairs]

    def loop(self, pattern: re.Pattern) -> Loop:
        """Return the loop over chunks that has a matching instruction for each vector.

        Raises:
            ValueError: if there is none.
        """
        pieces = self.pieces(pattern, VECTORS)
        if not pieces:
            raise ValueError(f"no loop: expected {VECTORS + 1} instructions like {pattern.pattern}")
        addresses, count = Counter(pieces).most_common(1)[0]
        return Loop(addresses, count / len(pieces))

    def block(self, pattern: re.Pattern, vectors: int) -> tuple[int, ...]:
        """Return the addresses of a block of so many vectors, from its first matching one on.

        Of all but the first and the last block it is that of median length.
        """
        pieces = self.pieces(pattern, vectors)[1:]
        return sorted(pieces, key=len)[len(pieces) // 2]

    def lines(self, addresses: Iterable[int]) -> list[str]:
        """Return the instructions at addresses."""
        return [self.texts[address] for address in addresses]


def traced(program: Program, given: bytes, log: Path) -> Trace:
    """Emulate a program, and return the trace of its step.

    Args:
        program: the program.
        given: what it reads.
        log: a file for what the emulator writes.

    Raises:
        RuntimeError: if the program fails.
    """
    # Without chaining, and with one instruction in each block, every instruction is logged.
    flags = ["-singlestep", "-d", "exec,nochain", "-D", str(log)]
    command = [*program.machine.emulator, *flags, str(program.path)]
    done = subprocess.run(command, input=given, capture_output=True)
    if done.returncode != 0:
        raise RuntimeError(f"{program.symbol} returned {done.returncode}: {done.stderr.decode()}")
    with open(log) as lines:
        executed = executed_addresses(lines)
    addresses = of_function(executed, *_places(program))
    return Trace(addresses, instructions(_output_of("llvm-objdump", *_DISASSEMBLE, program.path)))


_DISASSEMBLE = ("-d", "--no-show-raw-insn")


def executed_addresses(log: Iterable[str]) -> list[int]:
    """Return the addresses in a log of QEMU's `-singlestep -d exec,nochain`."""
    found = (_EXECUTED.match(line) for line in log)
    return [int(one[1], 16) for one in found if one]


def of_function(executed: Sequence[int], entry: int, caller: range) -> Sequence[int]:
    """Return the part of a trace from a function's entry until it returns to its caller."""
    begin = executed.index(entry)
    end = next(i for i in range(begin, len(executed)) if executed[i] in caller)
    return executed[begin:end]


def instructions(disassembly: str) -> dict[int, str]:
    """Return the instructions of llvm-objdump by address, with a label where one branches to."""
    found = map(_DISASSEMBLED.match, disassembly.splitlines())
    return {int(one[1], 16): assembly(one[2]) for one in found if one}


def assembly(text: str) -> str:
    """Return an instruction as an assembler reads it: without notes, and with a label."""
    text = re.split(r"\s+(?://|# )", text)[0]
    return re.sub(r"0x[0-9a-f]+ <[^>]*>", "label", text).replace("\t", " ").strip()


def _places(program: Program) -> tuple[int, range]:
    """Return where the step begins, and the addresses of the function that calls it."""
    entry, caller = None, None
    for line in _output_of("llvm-nm", "--print-size", program.path).splitlines():
        words = line.split()
        if len(words) == 4 and program.symbol in words[3]:
            entry = int(words[0], 16)
        if len(words) == 4 and words[3] == "main":
            begin = int(words[0], 16)
            caller = range(begin, begin + int(words[1], 16))
    if entry is None or caller is None:
        raise RuntimeError(f"{program.path} has no function {program.symbol} or no main")
    return entry, caller


def _output_of(tool: str, *arguments: str | Path) -> str:
    command = [llvm_tool(tool), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
