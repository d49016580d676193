# SPDX-License-Identifier: Apache-2.0
"""What a training run will need before it starts: `zero8 plan`."""
