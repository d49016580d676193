# SPDX-License-Identifier: Apache-2.0
"""`Adam8bitShared`: AdamW whose second moment is of rank 1 in tiles."""

import copy

import pytest
import torch
from small_optimizers import assert_equal, param, run, set_grads, small_model

import zero8
from zero8.algorithms.adam import ADAM, AdamScalars, next_history
from zero8.spec import dither, reference
from zero8.spec.codec import SHARED
from zero8.spec.grid import BlockGrid
from zero8.spec.segment import Moment, Rounding, Segment

pytestmark = pytest.mark.usefixtures("one_torch_thread")
KEYS = ("exp_avg_q8", "exp_avg_scale", "exp_avg_sq_q8_tiles", "exp_avg_sq_scale")


def made(params, optimizer_class=zero8.Adam8bitShared, **keywords):
    return optimizer_class(params, lr=0.01, weight_decay=0.1, **keywords)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shared_steps_are_those_of_the_reference(dtype):
    """Two bands, of which the second has fewer rows, and blocks with a ragged tail."""
    mine, theirs = param(100, 300, dtype=dtype), param(100, 300, dtype=dtype)
    keywords = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    optimizer = zero8.Adam8bitShared([("layer.weight", mine)], seed=5, **keywords)
    grid, identity = BlockGrid.of((100, 300), 256), dither.identity_of("layer.weight")
    scales = torch.zeros(2, grid.num_blocks)
    values = torch.zeros(30000, dtype=torch.uint8), torch.zeros(500, dtype=torch.uint8)
    moments = [Moment(*pair) for pair in zip(values, scales, strict=True)]
    history = 0.0
    for step in range(1, 6):
        set_grads([mine], step)
        optimizer.step()
        history = next_history(history, 0.9, 0.99)
        keys = [dither.stream_key(5, identity, stream) for stream in ("exp_avg_sq", "param")]
        moments[1].phase, param_phase = (dither.phase_of(key, step) for key in keys)
        segment = Segment(
            param=theirs.detach().view(-1),
            grad=mine.grad.view(-1),
            algorithm=ADAM,
            moments=moments,
            codec=SHARED,
            grid=grid,
            first=0,
            scalars=AdamScalars.at(step, history, **keywords),
            param_phase=param_phase,
            rounding=Rounding.DITHER,
        )
        assert reference.step(segment) == 0
        assert_equal([mine], [theirs])
        expected = (values[0], scales[0], values[1], scales[1])
        for key, tensor in zip(KEYS, expected, strict=True):
            assert torch.equal(optimizer.state[mine][key].flatten(), tensor), key


def test_shared_first_step_is_that_of_adam():
    """A step computes each element's own v'; only what it keeps is shared."""
    mine, theirs = param(70, 300), param(70, 300)
    run(made([mine]), [mine], 1)
    run(made([theirs], zero8.Adam8bitBlockwise), [theirs], 1)
    assert_equal([mine], [theirs])


def test_shared_states_have_the_bytes_that_the_class_promises():
    p = param(128, 1024)
    optimizer = made([("p", p)])
    run(optimizer, [p], 1)
    report = optimizer.memory_report()
    assert report.state_bytes_per_param() == 1 + 1 / 64 + 8 / 256
    (row,) = report.rows
    assert (row.bits, row.reason) == ((8 + 1 / 8) / 2, "128 rows x 4 blocks")


def test_shared_keeps_float32_moments_of_narrow_rows_and_says_so(caplog):
    p = param(2000, 8)
    optimizer = made([("lora", p)])
    assert "of narrow rows: 100.0%" in caplog.text
    run(optimizer, [p], 2)
    (row,) = optimizer.memory_report().rows
    assert (row.bits, row.reason) == (32, "rows of 8 elements, fewer than 64")
    theirs = param(2000, 8)
    run(made([theirs], zero8.Adam8bitBlockwise, min_8bit_size=10**9), [theirs], 2)
    assert_equal([p], [theirs])


def test_shared_resumes_with_the_bits_of_an_uninterrupted_run(tmp_path):
    model, other = small_model(), small_model()
    whole = made(model.named_parameters())
    run(whole, list(model.parameters()), 6)
    first = made(other.named_parameters())
    run(first, list(other.parameters()), 3)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second = made(other.named_parameters())
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    run(second, list(other.parameters()), 3, start=3)
    assert_equal(model.parameters(), other.parameters())
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        for key in KEYS:
            assert (key in whole.state[p]) == (key in second.state[q])
            if key in whole.state[p]:
                assert torch.equal(whole.state[p][key], second.state[q][key])


def test_shared_states_load_into_adam_and_come_back_with_the_same_bytes():
    """Into float32 moments they are exact, and v in `log` errs by less than codes of columns."""
    model = small_model()
    optimizer = made(model.named_parameters())
    run(optimizer, list(model.parameters()), 3)
    before = copy.deepcopy(optimizer.state_dict())
    for keywords in ({"min_8bit_size": 10**9}, {}):
        adam = made(model.named_parameters(), zero8.Adam8bitBlockwise, **keywords)
        adam.load_state_dict(before)
        back = made(model.named_parameters())
        back.load_state_dict(adam.state_dict())
        for number, state in before["state"].items():
            for key in KEYS if KEYS[0] in state else ():
                found = back.state_dict()["state"][number][key]
                if key == "exp_avg_sq_scale" and not keywords:
                    torch.testing.assert_close(found, state[key], rtol=0.04, atol=0)
                else:
                    assert torch.equal(found, state[key]), key


def test_shared_states_in_fp32_continue_as_in_8_bit():
    model, other = small_model(), small_model()
    pair = [made(one.named_parameters(), state_dict_format="fp32") for one in (model, other)]
    run(pair[0], list(model.parameters()), 3)
    saved = pair[0].state_dict()
    assert set(saved["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    pair[1].load_state_dict(saved)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        for key in KEYS:
            if key in pair[0].state[p]:
                assert torch.equal(pair[0].state[p][key], pair[1].state[q][key])


def test_shared_loads_the_moments_of_torchs_adamw():
    p = param(64, 256)
    adamw = torch.optim.AdamW([p], lr=0.01)
    run(adamw, [p], 3)
    optimizer = made([p])
    optimizer.load_state_dict(adamw.state_dict())
    kind = optimizer.kind_of(p, optimizer.state[p])
    stores = kind.moments(p, optimizer.state[p], optimizer._infos()[p])
    v, theirs = stores[1].read(0, p.numel()).view(64, 256), adamw.state[p]["exp_avg_sq"]
    # A row's sum is kept to 17 bits, and a column's to half a level; see `zero8.spec.shared`.
    torch.testing.assert_close(v.sum(1), theirs.sum(1), rtol=2.0**-16, atol=0)
    torch.testing.assert_close(v.sum(0), theirs.sum(0), rtol=1 / 32 + 1 / 31, atol=0)


def test_shared_leaves_blocks_with_gradients_that_are_not_finite(tmp_path):
    p = param(70, 300)
    optimizer = made([("p", p)])
    run(optimizer, [p], 2)
    before, state = p.detach().clone(), copy.deepcopy(optimizer.state[p])
    set_grads([p], 2)
    p.grad[3, 270] = torch.nan
    with pytest.raises(FloatingPointError, match="p"):
        optimizer.step()
    changed = torch.ones(70, 300, dtype=torch.bool)
    changed[3, 256:] = False
    assert torch.equal(p != before, changed)
    rows = torch.ones(70, 2, dtype=torch.bool)
    rows[3, 1] = False
    assert torch.equal(optimizer.state[p]["exp_avg_sq_scale"] != state["exp_avg_sq_scale"], rows)


def test_shared_is_a_function_of_seed_names_and_gradients_alone():
    model, other = small_model(torch.bfloat16), small_model(torch.bfloat16)
    run(made(model.named_parameters(), seed=3), list(model.parameters()), 3)
    backwards = list(other.named_parameters())[::-1]
    optimizer = made(backwards, seed=3)
    for step in range(3):
        set_grads(other.parameters(), step)
        optimizer.step()
    assert_equal(model.parameters(), other.parameters())


def test_codec_of_shared_is_refused_where_it_is_not_a_choice():
    with pytest.raises(ValueError, match=r"\(it is that of Adam8bitShared\), expected one"):
        zero8.Adam8bitBlockwise([param(64, 64)], codec="shared")
    with pytest.raises(ValueError, match="codec: got 'log', but Adam8bitShared has one codec"):
        zero8.Adam8bitShared([param(64, 64)], codec="log")


def test_shared_messages_name_the_class_and_its_keywords():
    with pytest.raises(ValueError, match="'blocksize' for Adam8bitShared") as caught:
        zero8.Adam8bitShared([param(64, 64)], blocksize=64)
    assert "block_size" in str(caught.value) and "codec" not in str(caught.value)
    with pytest.raises(ValueError, match="amsgrad: got True, Adam8bitShared supports False only"):
        zero8.Adam8bitShared([param(64, 64)], amsgrad=True)
    with pytest.raises(ValueError, match="pass it to Adam8bitShared itself"):
        zero8.Adam8bitShared([{"params": [param(64, 64)], "seed": 1}])


def test_shared_state_with_codes_of_narrow_rows_is_refused_as_damaged():
    p = param(640, 8)
    optimizer = made([p])
    run(optimizer, [p], 1)
    saved = optimizer.state_dict()
    whole = param(64, 80)
    other = made([whole])
    run(other, [whole], 1)
    saved["state"][0] = other.state_dict()["state"][0]
    header = saved["state"][0]["format"]
    header[-2:] = torch.tensor([640, 8])
    with pytest.raises(ValueError, match="codes of 'shared' for rows of 8 elements"):
        optimizer.load_state_dict(saved)


def test_shared_is_pickled_and_copied_as_what_it_is():
    p = param(64, 300)
    optimizer = made([p])
    run(optimizer, [p], 1)
    copied = copy.deepcopy(optimizer)
    assert type(copied) is zero8.Adam8bitShared and copied.codec == SHARED
    (q,) = copied.param_groups[0]["params"]
    for one, parameter in ((optimizer, p), (copied, q)):
        run(one, [parameter], 2, start=1)
    assert_equal([p], [q])
