# SPDX-License-Identifier: Apache-2.0
"""Agreement between ranks: whatever one of them cannot do, all know before they go on."""
