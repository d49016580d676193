# SPDX-License-Identifier: Apache-2.0
"""For DeepSpeed's monitor; everything that needs no call by the user is in `zero8.deepspeed`."""

import functools
from typing import Any

from zero8.integrations.health import Reports


def monitor(engine: Any, every: int = 50) -> None:
    """Write the health of the optimizer to the engine's monitor, every `every` optimizer steps.

        from zero8.integrations.deepspeed import monitor

        engine, *_ = deepspeed.initialize(model=model, config=config)
        monitor(engine, every=50)

    The sections "tensorboard", "csv_monitor", "wandb" and "comet" of the DeepSpeed config configure
    the monitor.  The values are `zero8.integrations.health.health` of rank 0; like DeepSpeed's own,
    they are written against the number of samples.

    Args:
        engine: from `deepspeed.initialize`; its `step` is wrapped.
        every: optimizer steps between two reports.

    Raises:
        ValueError: if the engine steps with another optimizer, or is a pipeline engine, which has
            no `step`, or its config enables no monitor.
    """
    if engine.pipeline_parallelism:
        raise ValueError("monitor: got a pipeline engine, expected one with `step`")
    if not engine.monitor.enabled:
        raise ValueError(
            'monitor: the DeepSpeed config enables no monitor; add, for example, "csv_monitor": '
            '{"enabled": true, "output_path": "logs/"}'
        )
    reports = Reports(engine.optimizer, every)
    if engine.global_rank > 0:  # only rank 0 writes
        reports.close()
        return
    step = engine.step

    @functools.wraps(step)
    def stepped(*args, **kwargs):
        before = engine.global_steps
        result = step(*args, **kwargs)
        if engine.global_steps > before:  # not during gradient accumulation
            values = reports.after(engine.global_steps)
            engine.monitor.write_events([(*item, engine.global_samples) for item in values.items()])
        return result

    engine.step = stepped
