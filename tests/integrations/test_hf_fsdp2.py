# SPDX-License-Identifier: Apache-2.0
"""FSDP2 by Accelerate, and by Hugging Face's Trainer, with CPU offload on two ranks."""

import pytest
from hf_worker import KINDS, train_with_fsdp2
from ranks import run_ranks

pytestmark = pytest.mark.integrations

by_both = pytest.mark.parametrize("by", ["accelerate", "trainer"])


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fsdp2")
    return run_ranks(train_with_fsdp2, 2, folder, timeout_s=400, folder=str(folder))


@pytest.mark.parametrize("kind", KINDS)
@by_both
def test_fsdp2_goes_on_with_the_bits_of_a_run_that_was_not_cut_off(found, by, kind):
    for rank in found:
        assert all(rank[by][kind]["equal"]) and not all(rank[by][kind]["fresh"])


@by_both
def test_fsdp2_keeps_names_for_fp32_params(found, by):
    for rank in found:
        bits = rank[by]["SHARDED_STATE_DICT"]["bits"]
        assert (bits["model.embed_tokens.weight"], bits["lm_head.weight"]) == (32, 8)
