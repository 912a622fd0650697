"""Where a run keeps its memory bank: `--bank-placement` and `--bank-dtype`."""

import torch

from instdisc.training.dist import Process
from pretrain.config import PretrainConfig
from pretrain.memory_bank import MemoryBank
from pretrain.sharded_bank import ShardedBank


def build_bank(config: PretrainConfig, num_images: int, process: Process) -> MemoryBank:
    """The bank of a run, at its random start."""
    size = (num_images, config.embedding_dim)
    dtype = torch.float16 if config.bank_dtype == "float16" else torch.float32
    if config.bank_placement == "sharded":
        return ShardedBank(
            *size,
            momentum=config.bank_momentum,
            seed=config.seed,
            dtype=dtype,
            rank=process.rank,
            world_size=process.world_size,
        ).to(process.device)
    bank = MemoryBank(*size, momentum=config.bank_momentum, seed=config.seed, dtype=dtype)
    if config.bank_placement == "replicated":
        return bank.to(process.device)
    if process.device.type == "cuda":
        bank.vectors = bank.vectors.pin_memory()  # copies to the GPU need not wait for the host
    return bank
