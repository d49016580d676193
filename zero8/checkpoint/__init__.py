# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: manifests, readers, and writers for other frameworks.

Imports nothing, because every import of a subpackage runs this file.
"""
