# SPDX-License-Identifier: Apache-2.0
"""The states that parameters keep between steps, and the policy and settings for them."""
