"""Label-free numbers about a table of features: is it spread out, or has it collapsed?"""

import torch
from torch import Tensor

CHUNK_ROWS = 1 << 16


def rankme(features: Tensor) -> float:
    """RankMe (Garrido et al., ICML 2023): exp of the entropy of the normalised singular values.

    From 1, all rows parallel, to the number of columns, all directions used alike. The singular
    values come from the D x D Gram matrix in float64, so that the number of rows costs no memory.

    Args:
        features: `(N, D)`.
    """
    gram = features.new_zeros(features.shape[1], features.shape[1], dtype=torch.float64)
    for rows in features.split(CHUNK_ROWS):
        gram += rows.double().T @ rows.double()
    singular = torch.linalg.eigvalsh(gram).clamp_min(0).sqrt()
    shares = singular / singular.sum().clamp_min(torch.finfo(torch.float64).tiny)
    return float(torch.special.entr(shares).sum().exp())


def mean_cosine(features: Tensor) -> float:
    """Mean cosine similarity of two different rows of a table of unit rows, `(N, D)`."""
    total = features.sum(dim=0, dtype=torch.float64).square().sum()
    itself = features.double().square().sum()
    return float((total - itself) / max(1, len(features) * (len(features) - 1)))
