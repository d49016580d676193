# SPDX-License-Identifier: Apache-2.0

import pytest
import torch

from examples.gpt import model as data


def write_files(folder, count):
    for i in range(count):
        (folder / f"{i:02}.txt").write_text(f"file {i} ".ljust(200, "."))
    return folder


def test_load_text_folder_splits_whole_files(tmp_path):
    text = data.load_text(str(write_files(tmp_path, 20)))
    assert text.train.numel() == 19 * 200
    held_out = bytes(text.validation.tolist())
    assert held_out in {path.read_bytes() for path in tmp_path.iterdir()}
    assert held_out not in bytes(text.train.tolist())


def test_load_text_folder_skips_binary_empty_and_hidden_files(tmp_path):
    write_files(tmp_path, 3)
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "empty.txt").touch()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text("ref: refs/heads/main")
    text = data.load_text(str(tmp_path))
    assert text.about["files"] == 3 and text.validation.numel() == 200
    again = data.load_text(str(tmp_path))
    assert torch.equal(again.validation, text.validation)


@pytest.mark.parametrize(("files", "folder"), [(0, "."), (1, "."), (0, "missing")])
def test_load_text_of_too_few_files_raises(tmp_path, files, folder):
    write_files(tmp_path, files)
    with pytest.raises(ValueError, match=f"found {files} text files"):
        data.load_text(str(tmp_path / folder))


def batch(text, *, seed=0, step=0, rank=0):
    return data.train_batch(text, 4, 16, seed=seed, step=step, rank=rank)


@pytest.mark.parametrize("other", [{"seed": 1}, {"step": 1}, {"rank": 1}])
def test_train_batch_other_seed_step_or_rank_differs(other):
    text = torch.randint(0, 256, (1000,), dtype=torch.uint8)
    assert not torch.equal(batch(text), batch(text, **other))


def test_validation_windows_cover_first_and_last_byte():
    text = torch.arange(100, dtype=torch.uint8)
    windows = data.validation_windows(text, 5, 16)
    assert windows.shape == (5, 17)
    assert windows[0, 0] == 0
    assert windows[-1, -1] == 99
