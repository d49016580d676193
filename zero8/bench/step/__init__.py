# SPDX-License-Identifier: Apache-2.0
"""What a step costs: `zero8 bench step`."""
