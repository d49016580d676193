# SPDX-License-Identifier: Apache-2.0
"""`zero8 plan`: estimates the memory, traffic and step time of a training run."""
