# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are complete or not there: manifests of folders, and the tags of a folder."""
