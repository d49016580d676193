# SPDX-License-Identifier: Apache-2.0
"""For DeepSpeed's engines; all that needs no call of yours is in `zero8.zero`."""

import functools
from typing import Any

from zero8.integrations.health import Reports


def monitor(engine: Any, every: int = 50) -> None:
    """Write the health of the optimizer to the engine's monitor, at every n-th optimizer step.

        from zero8.integrations.deepspeed import monitor

        engine, *_ = deepspeed.initialize(model=model, config=config)
        monitor(engine, every=50)

    The DeepSpeed config says where to: its sections "tensorboard", "csv_monitor", "wandb", "comet".
    The values are those of `zero8.integrations.health`, of rank 0, over samples as DeepSpeed's own.

    Args:
        engine: what `deepspeed.initialize` returned; its `step` is wrapped.
        every: how many optimizer steps lie between two reports.

    Raises:
        ValueError: if the engine steps with another optimizer, or is one of a pipeline, which has
            no `step`, or its config turns no monitor on.
    """
    if engine.pipeline_parallelism:
        raise ValueError("monitor: got an engine of a pipeline, expected one with `step`")
    if not engine.monitor.enabled:
        raise ValueError(
            'monitor: the DeepSpeed config turns no monitor on; add, for example, "csv_monitor": '
            '{"enabled": true, "output_path": "logs/"}'
        )
    reports = Reports(engine.optimizer, every)
    if engine.global_rank > 0:  # DeepSpeed writes on rank 0
        reports.close()
        return
    step = engine.step

    @functools.wraps(step)
    def stepped(*args, **kwargs):
        before = engine.global_steps
        result = step(*args, **kwargs)
        if engine.global_steps > before:  # not in the middle of gradient accumulation
            values = reports.after(engine.global_steps)
            engine.monitor.write_events([(*item, engine.global_samples) for item in values.items()])
        return result

    engine.step = stepped
