# SPDX-License-Identifier: Apache-2.0
"""Measurements that run in a checkout and are not installed with zero8."""
