# SPDX-License-Identifier: Apache-2.0
"""FSDP2 by Hugging Face's Trainer, and so by Accelerate, with CPU offload on two ranks."""

import pytest
from hf_worker import KINDS, train_with_fsdp2
from ranks import run_ranks

pytestmark = pytest.mark.integrations


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fsdp2")
    return run_ranks(train_with_fsdp2, 2, folder, timeout_s=400, folder=str(folder))


@pytest.mark.parametrize("kind", KINDS)
def test_fsdp2_goes_on_with_the_bits_of_a_run_that_was_not_cut_off(found, kind):
    for rank in (of_rank[kind] for of_rank in found):
        assert all(rank["equal"]) and not all(rank["fresh"])
        bits = rank["bits"]  # of `fp32_params`, which names find
        assert (bits["model.embed_tokens.weight"], bits["lm_head.weight"]) == (32, 8)
