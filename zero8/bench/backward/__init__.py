# SPDX-License-Identifier: Apache-2.0
"""What steps in the backward win and cost: `zero8 bench backward`."""
