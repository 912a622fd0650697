"""Whether a run learns: kNN accuracy (section 3.4) where there are labels, RankMe everywhere."""

import dataclasses

import numpy as np
import torch
from torch import Tensor

from instdisc.features.extract import extract_features
from instdisc.features.rankme import mean_cosine, rankme
from instdisc.images.sets import ImageSet
from instdisc.images.transforms import InputSpec
from instdisc.neighbors.vote import classify, top_k_accuracy
from instdisc.networks.backbones import Embedding
from instdisc.training.dist import Process
from pretrain.config import PretrainConfig

NUM_SAMPLED = 10_000  # training images that RankMe sees where there are no labels


@dataclasses.dataclass(frozen=True)
class Monitor:
    """Measures the features of the network as it is.

    Attributes:
        val: labelled images to classify by their neighbours in `train`; None for RankMe alone.
    """

    config: PretrainConfig
    train: ImageSet
    val: ImageSet | None
    spec: InputSpec
    process: Process

    def _features(self, model: Embedding, images: ImageSet, title: str) -> Tensor:
        return extract_features(
            model,
            images,
            self.spec,
            self.process,
            batch_size=self.config.batch_size,
            workers=self.config.workers,
            title=title,
            skip_bad=self.config.skip_bad_images,
        )

    def _accuracy(self, queries: Tensor, bank: Tensor, labels: np.ndarray) -> float:
        k = min(self.config.num_neighbors, len(self.train))
        predictions = classify(
            queries,
            bank,
            torch.from_numpy(self.train.labels),
            num_classes=len(self.train.classes),
            num_neighbors=k,
            # The authors' code votes with the training's tau: 0.07 on ImageNet, 0.1 on CIFAR.
            temperature=self.config.temperature,
        )[k]
        return top_k_accuracy(predictions, torch.from_numpy(labels), 1)

    def measure(self, model: Embedding, bank: Tensor) -> dict[str, float]:
        """Top-1 in percent with the bank and with recomputed features; RankMe, mean cosine."""
        training = model.training
        images = self.train
        if self.val is None and len(images) > NUM_SAMPLED:
            images = images.subset(np.linspace(0, len(images) - 1, NUM_SAMPLED).astype(int))
        rows = self._features(model, images, "features: train")
        measured = {"rankme": rankme(rows), "mean_cosine": mean_cosine(rows)}
        if self.val is not None:
            queries = self._features(model, self.val, "features: val")
            measured["knn_bank"] = self._accuracy(queries, bank.cpu(), self.val.labels)
            measured["knn_recomputed"] = self._accuracy(queries, rows, self.val.labels)
        model.train(training)
        return measured
