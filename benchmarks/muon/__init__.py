# SPDX-License-Identifier: Apache-2.0
"""What rounding the momentum of Muon costs: `python -m benchmarks.muon`."""
