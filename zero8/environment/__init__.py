# SPDX-License-Identifier: Apache-2.0
"""What is around a process: other ranks, locks, interrupts, the packages that are installed."""
