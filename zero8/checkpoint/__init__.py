# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: complete or not there, read as data, and written for others.

It imports nothing: importing one of its rooms runs this file.
"""
