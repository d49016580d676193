# SPDX-License-Identifier: Apache-2.0
"""What other trainers need besides the optimizer itself; each module imports its framework."""
