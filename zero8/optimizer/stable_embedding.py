# SPDX-License-Identifier: Apache-2.0
"""The embedding layer of the 8-bit optimizers paper."""

import inspect
from typing import Any

from torch import Tensor, nn

from zero8.state import float32_modules


class StableEmbedding(nn.Embedding):
    r"""A `torch.nn.Embedding` for 8-bit training: scaled start, normed output, 32-bit moments.

    Section 2.3 of Dettmers et al., arXiv:2110.02861.  For token t

        y = LayerNorm(weight[t]),    weight ~ U(-a, a),    a = sqrt(6 / (num_embeddings + dim))

    (Xavier's uniform distribution).  At the start y has the variance s / (s + 1e-5), where s =
    2 / (num_embeddings + dim) is that of the weight and 1e-5 the norm's eps: 1.0 for 500 tokens,
    0.8 for 50,000.  Position embeddings are added after it.

    zero8's optimizers keep the moments of its parameters in float32 without a setting, also where
    `weight` is tied to another layer, in plain PyTorch, under DeepSpeed and under FSDP2.

    Input and output have the shapes and dtypes of `torch.nn.Embedding`: integers (*), and (*,
    embedding_dim) in the dtype of `weight`, under autocast, too.  `norm` has that dtype as well.
    The row of `padding_idx` starts at 0 and gets no gradient; the output there is `norm.bias`.

    A state dict has `weight`, `norm.weight` and `norm.bias`, the names of bitsandbytes.  A state
    dict of a plain embedding has only `weight` and loads with `strict=False`: the norm keeps its
    values.

    Arguments are those of `torch.nn.Embedding`.  zero8's optimizers refuse to step with the
    gradients of `sparse=True`.

    Attributes:
        norm: the `torch.nn.LayerNorm`.

    Raises:
        AssertionError: if `padding_idx` is not a token, as from torch.
    """

    __signature__ = inspect.signature(nn.Embedding)

    def __init__(self, *args: Any, **keywords: Any):
        """Make the weight and the norm."""
        super().__init__(*args, **keywords)
        # A given weight has its own device and dtype.
        given = self.weight
        self.norm = nn.LayerNorm(self.embedding_dim, device=given.device, dtype=given.dtype)
        float32_modules.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied or unpickled layer."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch's has no annotations
        float32_modules.add(self)

    def reset_parameters(self) -> None:
        """Draw the weight anew, with zeros at `padding_idx`; `norm` has its own method."""
        nn.init.xavier_uniform_(self.weight)
        self._fill_padding_idx_with_zero()

    def forward(self, input: Tensor) -> Tensor:
        """Return the normed embeddings, (*, embedding_dim), of tokens (*)."""
        embedded = super().forward(input)
        normed: Tensor = self.norm(embedded)
        return normed.to(embedded.dtype)  # autocast norms to float32
