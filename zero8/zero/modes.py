# SPDX-License-Identifier: Apache-2.0
"""The modes of ZeRO that cannot work with an 8-bit optimizer."""


def unsupported_mode(zero_config) -> str | None:
    """Return why a ZeRO mode cannot work with an 8-bit optimizer and what to do, or None."""
    reason = None
    offload = zero_config.offload_optimizer
    if getattr(zero_config, "zenflow", None) is not None:
        reason = 'zenflow: it steps with an optimizer process of its own; remove "zenflow"'
    elif zero_config.elastic_checkpoint and zero_config.stage > 0:
        reason = (
            "elastic_checkpoint: DeepSpeed could not load what it saves; remove it. For another "
            "number of ranks: zero8 checkpoint convert DIR OUT --to zero"
        )
    elif offload is not None and offload.super_offload:
        reason = (
            "offload_optimizer.super_offload: it steps with DeepSpeedCPUAdam in a process of its "
            "own and undoes steps, which 8-bit states do not allow; set it to false"
        )
    elif offload is not None and offload.ratio < 1.0 and offload.device != "none":
        reason = (
            f"offload_optimizer.ratio {offload.ratio}: DeepSpeed steps the other part with "
            "another optimizer; set it to 1.0"
        )
    elif offload is not None and offload.device == "nvme" and zero_config.stage < 3:
        reason = (
            f'offload_optimizer.device "nvme" in ZeRO stage {zero_config.stage}: DeepSpeed would '
            'keep the states in memory silently; use stage 3, or "cpu"'
        )
    elif offload is not None and offload.device == "nvme" and offload.nvme_path is None:
        reason = (
            'offload_optimizer.device "nvme" without "nvme_path": set it to a folder on the disk'
        )
    return reason
