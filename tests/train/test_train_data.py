# SPDX-License-Identifier: Apache-2.0

import pytest

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


@pytest.mark.parametrize(("files", "folder"), [(0, "."), (1, "."), (0, "missing")])
def test_load_text_of_too_few_files_raises(tmp_path, files, folder):
    write_files(tmp_path, files)
    with pytest.raises(ValueError, match=f"found {files} text files"):
        data.load_text(str(tmp_path / folder))
