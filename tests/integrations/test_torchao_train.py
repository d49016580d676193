# SPDX-License-Identifier: Apache-2.0
"""The demonstration with torchao's INT8 weights in its linear layers, under FSDP2."""

import pytest
from train_worker import FSDP2, check_resumed

from examples.gpt.__main__ import INT8

pytestmark = pytest.mark.integrations


def test_run_with_int8_weights_that_is_resumed_has_the_bits_of_one_that_never_stopped(
    standing_ranks, tmp_path
):
    check_resumed(standing_ranks, tmp_path, engine=FSDP2, weights=INT8)
