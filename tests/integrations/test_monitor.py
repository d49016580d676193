# SPDX-License-Identifier: Apache-2.0
"""The optimizer's health in the logs of Trainer, in TensorBoard, and in DeepSpeed's monitor."""

from types import SimpleNamespace

import hf_models
import monitor_worker
import pytest
import torch
from ranks import run_ranks
from small_optimizers import param
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import Trainer
from transformers.integrations import TensorBoardCallback

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
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORBOARD_LOGGING_DIR", str(folder / "events"))
        made = trainer(folder)
        # Where Trainer puts it for "tensorboard" in `report_to`, which is empty in hf_models.
        made.callback_handler.callbacks.insert(1, TensorBoardCallback())

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


def test_trainer_writes_the_health_to_tensorboard(found):
    made, _, folder = found
    events = EventAccumulator(str(folder / "events")).Reload()
    assert {tag for tag in events.Tags()["scalars"] if "zero8" in tag} == {
        f"train/{name}" for name in NAMES
    }
    scalars = events.Scalars("train/zero8/share_8bit")
    expected = health(made.optimizer.optimizer)["zero8/share_8bit"]
    assert [(e.step, e.value) for e in scalars] == [(s, pytest.approx(expected)) for s in (2, 4, 6)]


def test_trainer_whose_log_gathers_metrics_is_not_asked_for_them_by_the_health(found):
    assert any("loss" in logs for logs in found[1])
    assert not any(ours(logs) for logs in found[1])


def test_trainer_takes_the_time_of_steps_only_while_it_trains(tmp_path):
    made = trainer(tmp_path)
    monitor = hf.Monitor(made, every=2)
    made.add_callback(monitor)
    made.create_optimizer()
    hooks = made.optimizer._optimizer_step_pre_hooks
    for _ in range(2):  # the first is ended by an error, of which callbacks hear nothing
        monitor.on_train_begin(made.args, made.state, made.control, optimizer=made.optimizer)
        assert len(hooks) == 1
    monitor.on_train_end(made.args, made.state, made.control)
    assert not hooks


def test_trainer_with_another_optimizer_is_refused_before_it_trains(tmp_path):
    made = hf_models.trainer(tmp_path)
    made.add_callback(hf.Monitor(made))
    with pytest.raises(ValueError, match="got AdamW, expected an optimizer of zero8"):
        made.train()
    assert made.state.global_step == 0


def test_trainer_logs_nothing_of_it_without_the_callback(tmp_path):
    made = trainer(tmp_path)
    made.train()
    assert made.state.log_history and not any(map(ours, made.state.log_history))


STAGES = (2, 3)


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("engines"))
    arguments = {"folder": folder, "stages": STAGES}
    (result,) = run_ranks(
        monitor_worker.monitored, 1, tmp_path_factory.mktemp("ranks"), timeout_s=120, **arguments
    )
    return result


@pytest.mark.parametrize("stage", STAGES)
def test_deepspeed_writes_the_health_where_its_config_says_at_every_nth_step(engines, stage):
    files, num_bytes = engines[stage]["after"], engines[stage]["bytes"]
    assert {name for name in files if name.startswith("zero8")} == {
        name.replace("/", "_") for name in NAMES
    }
    samples = monitor_worker.ROWS * monitor_worker.ACCUMULATED
    header, *rows = files["zero8_state_bytes"]
    assert header == ["step", "state_bytes"]
    found = [[int(step), float(value)] for step, value in rows]
    assert found == [[6 * samples, num_bytes], [8 * samples, num_bytes]]
    assert all(float(value) > 0 for _, value in files["zero8_step_ms"][1:])


@pytest.mark.parametrize("stage", STAGES)
def test_deepspeed_writes_nothing_of_it_unless_it_is_asked_to(engines, stage):
    files = engines[stage]["before"]
    assert files and not any("zero8" in name for name in files)


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
        (
            {"optimizer": torch.optim.AdamW([param(4, 4)])},
            "got AdamW, expected an optimizer of zero8",
        ),
    ],
)
def test_deepspeed_engine_that_would_write_nothing_is_refused(others, message):
    engine = stand_in(**others)
    with pytest.raises(ValueError, match=message):
        deepspeed.monitor(engine)
    assert engine.step is print


def test_deepspeed_ranks_that_write_nothing_are_left_as_they_are():
    engine = stand_in(global_rank=1)
    deepspeed.monitor(engine)
    assert engine.step is print and not engine.optimizer._optimizer_step_pre_hooks
    assert not engine.optimizer._optimizer_step_post_hooks
