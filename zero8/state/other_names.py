# SPDX-License-Identifier: Apache-2.0
"""Hints for unknown keywords: other libraries' names, and misspellings."""

import difflib
from collections.abc import Sequence

_BETAS = "Did you mean 'betas', as in betas=(0.9, 0.999)?"

ADVICE = {
    # bitsandbytes
    "optim_bits": "Leave it out: moments are 8-bit, except those that fp32_params names.",
    "args": "Leave it out: every setting is a keyword.",
    "block_wise": "Leave it out: every block of block_size elements has a scale.",
    "percentile_clipping": "Leave it out, and clip by torch.nn.utils.clip_grad_norm_.",
    "is_paged": "Leave it out: DeepSpeed's offload_optimizer or FSDP2's CPUOffloadPolicy keeps "
    "states in host memory.",
    # torchao
    "compile_backend": "Leave it out: the kernel is C++, compiled without torch.compile.",
    "bf16_stochastic_round": "Did you mean 'stochastic_rounding'?  It is on by default.",
    # Trainers, papers and other frameworks
    "wd": "Did you mean 'weight_decay'?",
    "learning_rate": "Did you mean 'lr'?",
    "beta1": _BETAS,
    "beta2": _BETAS,
    "momentum": _BETAS,
}
"""What to do with other libraries' keywords, in sentences."""


def hint(key: str, valid: Sequence[str]) -> str:
    """Return advice on an unknown keyword, "" if it resembles none."""
    advice = ADVICE.get(key)
    if advice and (advice is not _BETAS or "betas" in valid):
        return advice
    near = difflib.get_close_matches(key.lower(), valid, n=1)
    return f"Did you mean {near[0]!r}?" if near else ""
