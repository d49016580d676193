# SPDX-License-Identifier: Apache-2.0
"""What is kept of a parameter between steps, and what decides it."""
