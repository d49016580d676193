# SPDX-License-Identifier: Apache-2.0
"""The optimizers that users name, and their step."""
