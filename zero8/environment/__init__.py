# SPDX-License-Identifier: Apache-2.0
"""Collectives of zero8: agreement between ranks, and numbers reduced over them."""
