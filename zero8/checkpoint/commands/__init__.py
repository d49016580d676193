# SPDX-License-Identifier: Apache-2.0
"""The commands `zero8 checkpoint ...`."""
