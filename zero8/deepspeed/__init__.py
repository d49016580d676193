# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: states of flat partitions, and every place where zero8 patches it."""
