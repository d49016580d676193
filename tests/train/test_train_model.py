# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from examples.gpt.model import GPT, GPTConfig

SMALL = GPTConfig(context=16, width=32, layers=2, heads=2)


def test_gpt_loss_at_initialization_is_near_uniform():
    torch.manual_seed(0)
    loss = GPT(SMALL)(torch.randint(0, 256, (8, 17)))
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


def test_block_later_byte_changes_no_earlier_output():
    torch.manual_seed(0)
    block = GPT(SMALL).blocks[0]
    x = torch.randn(1, 16, 32)
    changed = x.clone()
    changed[:, 10] = torch.randn(32)
    differs = (block(x) != block(changed)).any(dim=-1)[0]
    assert differs.tolist() == [False] * 10 + [True] * 6
