# SPDX-License-Identifier: Apache-2.0
"""The compiled step: how it is built, and how it is called."""
