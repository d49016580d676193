# SPDX-License-Identifier: Apache-2.0
"""What `import zero8` offers."""

import pytest

import zero8


def test_public_names_are_in_dir_and_can_be_imported():
    assert set(zero8.__all__) == {
        "Adam8bitBlockwise",
        "AdEMAMix8bitBlockwise",
        "Lion8bitBlockwise",
        "Muon8bitBlockwise",
        "SGD8bitBlockwise",
        "StableEmbedding",
        "__version__",
        "assert_active",
        "export",
    }
    assert set(zero8.__all__) <= set(dir(zero8))
    for name in zero8.__all__:
        assert getattr(zero8, name) is not None


def test_unknown_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="module 'zero8' has no attribute 'Adam8bit'"):
        zero8.Adam8bit  # noqa: B018, the access is what is tested
