# SPDX-License-Identifier: Apache-2.0
"""Scripts and a program that train with zero8; they run in a checkout and are not installed."""
