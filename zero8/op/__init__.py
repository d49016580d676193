# SPDX-License-Identifier: Apache-2.0
"""The compiled step: building it and calling it."""
