# SPDX-License-Identifier: Apache-2.0
"""Two processes that prune one folder at once, again and again.

Each must do its work or say that the other holds the lock: no traceback, and no error about a file
that the other process has deleted under its hands.
"""

from pathlib import Path

from attack import Attack, checkpoint, main, sealed
from child_process import Answer, start

ROUNDS, TAGS = 12, 6


def many_tags(folder: Path) -> list[str]:
    for number in range(ROUNDS):
        for tag in range(TAGS):
            sealed(folder / f"round{number}" / f"t{tag}")
    return checkpoint("prune", folder / "round0", "--keep", 1)


def two_at_once(line: list[str], output: Path, seconds: float) -> Answer:
    """Run the command twice at once on the folder of each round; return the worst answer."""
    answers = []
    for number in range(ROUNDS):
        here = [text.replace("round0", f"round{number}") for text in line]
        children = [start(here, output.with_name(f"output{n}")) for n in range(2)]
        answers += [child.answer(seconds) for child in children]
    (output.parent / "output").write_text("".join(answer.text for answer in answers))
    bad = [answer for answer in answers if not _is_good(answer)]
    return max(bad or answers, key=lambda answer: answer.seconds)


def _is_good(answer: Answer) -> bool:
    return answer.status == 0 or (answer.status is not None and ".zero8_lock" in answer.text)


def check(folder: Path, answer: Answer) -> str:
    if not _is_good(answer):
        return "got neither its work nor a message about .zero8_lock"
    for word in ("[Errno 2]", "No such file"):
        if word in (folder / "output").read_text():
            return f"one process says {word!r}"
    left = [len(list(folder.glob(f"round{n}/t*"))) for n in range(ROUNDS)]
    return "" if set(left) == {1} else f"got {left} tags left, expected one in each round"


ATTACKS = (Attack("two at once", many_tags, (0, 1, 2), check=check, run=two_at_once),)

if __name__ == "__main__":
    main(ATTACKS)
