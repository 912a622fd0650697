"""Whether a run learns: kNN accuracy (section 3.4) where there are labels, RankMe everywhere."""

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from instdisc.features.extract import extract_features
from instdisc.features.rankme import mean_cosine, rankme
from instdisc.images.sets import ImageSet
from instdisc.images.transforms import InputSpec
from instdisc.neighbors.shared import classify_shared, to_device
from instdisc.neighbors.vote import top_k_accuracy
from instdisc.networks.backbones import Embedding
from instdisc.training.dist import Process
from pretrain.config import PretrainConfig

NUM_SAMPLED = 10_000  # training images that RankMe sees where there are no labels


@dataclasses.dataclass(frozen=True)
class Monitor:
    """Measures the features of the network as it is, all processes together.

    Attributes:
        val: labelled images to classify by their neighbours in `train`; None for RankMe alone.
    """

    config: PretrainConfig
    train: ImageSet
    val: ImageSet | None
    spec: InputSpec
    process: Process

    def _features(
        self, model: Embedding, images: ImageSet, title: str, check: Callable[[], None]
    ) -> Tensor:
        return extract_features(
            model,
            images,
            self.spec,
            self.process,
            batch_size=self.config.batch_size,
            workers=self.config.workers,
            title=title,
            skip_bad=self.config.skip_bad_images,
            check=check,
        )

    def _accuracy(
        self, queries: Tensor, bank: Tensor, labels: np.ndarray, check: Callable[[], None]
    ) -> float:
        k = min(self.config.num_neighbors, len(self.train))
        predictions = classify_shared(
            queries,
            bank,
            torch.from_numpy(self.train.labels),
            self.process,
            num_classes=len(self.train.classes),
            num_neighbors=(k,),
            # The authors' code votes with the training's tau: 0.07 on ImageNet, 0.1 on CIFAR.
            temperature=self.config.temperature,
            check=check,
        )[k]
        return top_k_accuracy(predictions, torch.from_numpy(labels), 1)

    def measure(
        self, model: Embedding, bank: Tensor | None, check: Callable[[], None]
    ) -> dict[str, float]:
        """Top-1 in percent with the bank and with recomputed features; RankMe, mean cosine.

        Args:
            model: the network; its mode is put back.
            bank: `(N, D)` rows of the training images, on every process; None without `val`.
            check: called every few seconds, equally often on every process; raises to stop.
        """
        training = model.training
        images = self.train
        if self.val is None and len(images) > NUM_SAMPLED:
            images = images.subset(np.linspace(0, len(images) - 1, NUM_SAMPLED).astype(int))
        rows = self._features(model, images, "features: train", check)
        rows = to_device(rows, self.process.device)
        measured = {"rankme": rankme(rows), "mean_cosine": mean_cosine(rows)}
        if self.val is not None:
            assert bank is not None
            queries = self._features(model, self.val, "features: val", check)
            measured["knn_bank"] = self._accuracy(queries, bank, self.val.labels, check)
            measured["knn_recomputed"] = self._accuracy(queries, rows, self.val.labels, check)
        model.train(training)
        return measured
