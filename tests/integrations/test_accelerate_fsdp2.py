# SPDX-License-Identifier: Apache-2.0
"""Accelerate with `fsdp_version: 2` and CPU offload, on two ranks."""

import pytest
from hf_worker import train_with_fsdp2
from ranks import run_ranks

pytestmark = pytest.mark.integrations


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fsdp2")
    return run_ranks(train_with_fsdp2, 2, folder, timeout_s=300, folder=str(folder))


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_accelerate_fsdp2_goes_on_with_the_bits_of_a_run_that_was_not_cut_off(found, kind):
    for rank in found:
        assert all(rank[kind]["equal"]) and not all(rank[kind]["fresh"])


def test_accelerate_fsdp2_keeps_names_for_fp32_params(found):
    for rank in found:
        bits = rank["SHARDED_STATE_DICT"]["bits"]
        assert (bits["model.embed_tokens.weight"], bits["lm_head.weight"]) == (32, 8)
