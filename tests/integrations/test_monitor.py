# SPDX-License-Identifier: Apache-2.0
"""The optimizer's health in the logs of Trainer, in TensorBoard, and in DeepSpeed's monitor."""

from types import SimpleNamespace

import hf_models
import pytest
from small_optimizers import param
from transformers import Trainer

import zero8
from zero8.integrations import deepspeed, hf
from zero8.integrations.health import health

pytestmark = pytest.mark.integrations

NAMES = {
    *("zero8/state_bytes", "zero8/share_8bit", "zero8/nonfinite_blocks", "zero8/clipped"),
    "zero8/step_ms",
    *(f"zero8/{which}_at_{end}" for which in ("exp_avg", "exp_avg_sq") for end in ("top", "floor")),
}


def trainer(folder, **others):
    args = hf_models.arguments(folder, logging_steps=2, **others)
    given = hf.optimizer(args)
    return hf_models.trainer(folder, args=args, optimizer_cls_and_kwargs=given)


def ours(log: dict) -> dict:
    return {name: value for name, value in log.items() if name.startswith("zero8/")}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return a Trainer that has been monitored, what its own `log` got, and its folder."""
    folder, seen = tmp_path_factory.mktemp("trainer"), []
    made = trainer(folder)

    def log(logs, start_time=None):
        seen.append(dict(logs))
        Trainer.log(made, logs, start_time)

    made.log = log
    made.add_callback(hf.Monitor(made, every=2))
    made.train()
    return made, seen, folder


def test_trainer_logs_the_health_at_every_nth_step_and_the_loss_as_before(found):
    made, _, _ = found
    history = made.state.log_history
    reports = [(log["step"], ours(log)) for log in history if ours(log)]
    assert [step for step, _ in reports] == [2, 4, 6]
    assert {name for _, values in reports for name in values} == NAMES
    assert [log["step"] for log in history if "loss" in log] == [2, 4, 6]
    last, now = reports[-1][1], health(made.optimizer.optimizer)
    assert last.pop("zero8/step_ms") > 0
    assert last == now


def test_trainer_whose_log_gathers_metrics_is_not_asked_for_them_by_the_health(found):
    assert any("loss" in logs for logs in found[1])
    assert not any(ours(logs) for logs in found[1])


def stand_in(**others):
    optimizer = zero8.Adam8bitBlockwise([param(64, 100)])
    of_engine = {"optimizer": optimizer, "pipeline_parallelism": False, "step": print}
    monitor = SimpleNamespace(enabled=True)
    return SimpleNamespace(**of_engine | {"monitor": monitor, "global_rank": 0} | others)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"monitor": SimpleNamespace(enabled=False)}, '"csv_monitor": {"enabled": true'),
        ({"pipeline_parallelism": True}, "got a pipeline engine"),
    ],
)
def test_deepspeed_engine_that_would_write_nothing_is_refused(others, message):
    engine = stand_in(**others)
    with pytest.raises(ValueError, match=message):
        deepspeed.monitor(engine)
    assert engine.step is print
