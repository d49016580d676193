# SPDX-License-Identifier: Apache-2.0
"""Writers of checkpoints for other frameworks, other optimizers and other numbers of ranks."""
