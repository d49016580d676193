# SPDX-License-Identifier: Apache-2.0
"""Files of checkpoints: manifests, tags, atomic writes, safe access."""
