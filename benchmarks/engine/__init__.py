# SPDX-License-Identifier: Apache-2.0
"""Steps of whole engines, zero8's optimizer beside DeepSpeed's or torch's."""
