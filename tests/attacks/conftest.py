# SPDX-License-Identifier: Apache-2.0
"""The process that forks for the command of each attack."""

import attack
import pytest
from forks import Forks


@pytest.fixture(scope="session")
def commands(tmp_path_factory):
    forks = Forks(tmp_path_factory.mktemp("attacks"), before=attack.IMPORTS)
    forks.run("")  # the imports are not in the first attack's time limit
    yield forks
    forks.close()
