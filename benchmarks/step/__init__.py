# SPDX-License-Identifier: Apache-2.0
"""Times and memory of optimizer steps, on a CPU or a GPU."""
