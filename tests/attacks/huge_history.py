# SPDX-License-Identifier: Apache-2.0
"""States with an entry `history` of 2 to the power of 70, of one process and of ZeRO.

The entry is a float, a bound on m^2/v.  An integer of 71 bits is none that zero8 has written, and
must be refused where it is read.
"""

from pathlib import Path

import torch
from attack import Attack, checkpoint, main, python
from crafted_cases import with_codes
from crafted_files import value
from small_checkpoints import plain_file, zero_folder

HISTORY = 2**70


def verify_plain(folder: Path) -> list[str]:
    (folder / "states.pt").write_bytes(with_codes("history", value(HISTORY)))
    return checkpoint("verify", folder / "states.pt")


def verify_zero(folder: Path) -> list[str]:
    tags = zero_folder(folder / "tags")
    path = tags / "global_step3" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    held = torch.load(path, weights_only=False)
    held["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["history"] = HISTORY
    torch.save(held, path)
    return checkpoint("verify", tags)


def load_state_dict(folder: Path) -> list[str]:
    """Load a state dict whose first state has the entry."""
    path = plain_file(folder / "states.pt")
    held = torch.load(path, weights_only=False)
    held["optimizer"]["state"][0]["history"] = HISTORY
    torch.save(held, path)
    code = """
import torch
from small_checkpoints import trained
_, optimizer = trained()
optimizer.load_state_dict(torch.load({path!r}, weights_only=False)["optimizer"])
"""
    return python(code, path=str(path))


ATTACKS = (
    Attack("plain state, verify", verify_plain, (1,), ("history",)),
    Attack("state of ZeRO, verify", verify_zero, (1,), ("history",)),
    Attack("plain state, load_state_dict", load_state_dict, (1,), ("ValueError", "history")),
)

if __name__ == "__main__":
    main(ATTACKS)
