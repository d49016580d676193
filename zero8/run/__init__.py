# SPDX-License-Identifier: Apache-2.0
"""What runs inside of a rank that launch/rank.py watches: limits for groups, and signs of life."""
