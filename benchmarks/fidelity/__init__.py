# SPDX-License-Identifier: Apache-2.0
"""How far states and weights of few bits are from fp32: updates and final losses."""
