# SPDX-License-Identifier: Apache-2.0
"""`zero8 bench engine`: the time from the last gradient to the next forward, in whole engines."""
