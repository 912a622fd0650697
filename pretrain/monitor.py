"""kNN accuracy during training, from the bank and from recomputed features (section 3.4)."""

import dataclasses

import torch
from torch import Tensor

from instdisc.features.extract import extract_features
from instdisc.images.sets import ImageSet
from instdisc.images.transforms import InputSpec
from instdisc.neighbors.vote import classify, top_k_accuracy
from instdisc.networks.backbones import Embedding
from instdisc.training.dist import Process

VOTE_TEMPERATURE = 0.07


@dataclasses.dataclass(frozen=True)
class KnnMonitor:
    """Classifies the validation images by their neighbours among the training images."""

    train: ImageSet
    val: ImageSet
    spec: InputSpec
    process: Process
    num_neighbors: int
    batch_size: int
    workers: int
    skip_bad: bool

    def _features(self, model: Embedding, images: ImageSet, title: str) -> Tensor:
        return extract_features(
            model,
            images,
            self.spec,
            self.process,
            batch_size=self.batch_size,
            workers=self.workers,
            title=title,
            skip_bad=self.skip_bad,
        )

    def _accuracy(self, queries: Tensor, bank: Tensor) -> float:
        k = min(self.num_neighbors, len(self.train))
        predictions = classify(
            queries,
            bank,
            torch.from_numpy(self.train.labels),
            num_classes=len(self.train.classes),
            num_neighbors=k,
            temperature=VOTE_TEMPERATURE,
        )[k]
        return top_k_accuracy(predictions, torch.from_numpy(self.val.labels), 1)

    def measure(self, model: Embedding, bank: Tensor) -> dict[str, float]:
        """Top-1 in percent with the training-time bank and with recomputed training features."""
        training = model.training
        queries = self._features(model, self.val, "kNN: val")
        recomputed = self._features(model, self.train, "kNN: train")
        model.train(training)
        return {
            "knn_bank": self._accuracy(queries, bank.cpu()),
            "knn_recomputed": self._accuracy(queries, recomputed),
        }
