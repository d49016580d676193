# SPDX-License-Identifier: Apache-2.0
"""What ranks do with what the pages show."""

from zero_worker import Model, base_optimizer, make_engine, train

import zero8


def bits_in_an_engine(ds_config):
    """Take steps in an engine of a config without a batch size; return what it is."""
    engine = make_engine(ds_config | {"train_micro_batch_size_per_gpu": 4}, Model())
    train(engine, 2)
    zero8.assert_active(engine)
    optimizer = base_optimizer(engine)
    return {
        "type": type(optimizer).__name__,
        "bits": {row.bits for row in optimizer.memory_report().rows},
        "stage": engine.zero_optimization_stage(),
        "offload": str(engine.zero_offload_optimizer().device),
    }
