# SPDX-License-Identifier: Apache-2.0
"""`zero8 bench step`: times and memory of a step."""
