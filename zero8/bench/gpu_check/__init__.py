# SPDX-License-Identifier: Apache-2.0
"""Everything that has to be run on a GPU: `make gpu-check`."""
