# SPDX-License-Identifier: Apache-2.0
"""How the codecs of Adam compare: `python -m benchmarks.codecs`."""
