"""The memory bank: one unit vector per training image (the paper, section 3.1)."""

import torch
from torch import Tensor, nn

from instdisc.seed import generator


class MemoryBank(nn.Module):
    """Rows v_1..v_n on the unit sphere, random at the start.

    Every process holds all rows and applies the same updates in the same order, so that the copies
    stay equal bit by bit; `checksum` lets training prove it.

    Attributes:
        vectors: `(N, D)` unit rows, float32.
        momentum: weight of the old row in an update; 0 replaces it, as the paper does.
    """

    vectors: Tensor

    def __init__(self, num_images: int, dim: int, *, momentum: float, seed: int) -> None:
        super().__init__()
        self.momentum = momentum
        noise = torch.randn(num_images, dim, generator=generator(seed, "bank"))
        self.register_buffer("vectors", nn.functional.normalize(noise, dim=1))

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of the given images, `(B, D)`."""
        return self.vectors[indices]

    @torch.no_grad()
    def update(self, indices: Tensor, features: Tensor) -> None:
        """Row i <- normalize(momentum * v_i + (1 - momentum) * f_i); each index occurs once."""
        if self.momentum:
            features = self.momentum * self.vectors[indices] + (1 - self.momentum) * features
        self.vectors[indices] = nn.functional.normalize(features, dim=1)

    def checksum(self) -> int:
        """A number that changes with any bit of any row, whichever process computes it."""
        bits = self.vectors.contiguous().view(torch.int32).to(torch.int64)
        places = torch.arange(1, bits.shape[0] + 1, device=bits.device)[:, None]
        return int((bits * places).sum().item())
