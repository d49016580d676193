# SPDX-License-Identifier: Apache-2.0
"""`zero8 bench backward`: gains and costs of steps in the backward."""
