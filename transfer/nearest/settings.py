"""Flags of transfer/knn.py, fewshot.py, retrieve.py and embed.py. Imports no torch."""

import dataclasses
from typing import Literal

from instdisc.names import FEATURE_CHOICES, Precision
from transfer.config import TransferConfig, check, protocol_option, run_option

PAPER_NUM_NEIGHBORS = 200  # section 3.4: k of the weighted kNN
SHOTS = (1, 5, 20)
STORED = (
    "of the stored features; half takes half the space. It did not move the accuracy of trained "
    "networks, and did that of an untrained one, whose features are nearly parallel, by 0.8 points"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnnConfig(TransferConfig):
    """Weighted k-nearest-neighbour classification (paper, sections 3.4 and 4.2)."""

    PROG = "transfer/knn.py"
    DESCRIPTION = """
    Weighted k-nearest-neighbour classification, the paper's first question to a
    representation (sections 3.4 and 4.2): each of the k nearest training images
    votes for its class with weight exp(cosine similarity / tau). Defaults are the
    paper's: the 128-d output recomputed for all training images, k 200, tau 0.07.
    """
    EPILOG = """
    examples:
      python transfer/knn.py                                    newest run, on its own images
      python transfer/knn.py --k 10 20 100 200 --features embedding bank backbone
      python transfer/knn.py --weights runs/pretrain/resnet50 --data /data/places205
      python transfer/knn.py --weights timm:resnet50.a1_in1k --data /data/imagenet
      torchrun --nproc-per-node 8 transfer/knn.py --data /data/imagenet
    Features are computed once and kept in runs/features; a stopped command goes on
    where it was. Each number becomes a row of runs/results.jsonl, with the accuracy
    of every class in it.
    """

    features: tuple[str, ...] | None = protocol_option(
        None,
        "embedding: the output, recomputed for all training images, the paper's choice and the "
        "default; bank: the memory bank at the end of training; backbone: pooled features before "
        "the projection, the default where there is no projection; conv1..conv5, or stageN or "
        "blockN of a timm network: averaged maps",
        choices=("bank", *FEATURE_CHOICES),
    )
    num_neighbors: tuple[int, ...] | None = protocol_option(
        None,
        f"one or several; none given is the paper's {PAPER_NUM_NEIGHBORS}, or all training "
        "images where there are fewer",
        aliases=["-k", "--k"],
        metavar="K",
    )
    temperature: float = protocol_option(
        0.07, "tau of the weights exp(similarity / tau)", aliases=["--tau"]
    )
    precision: Precision = run_option("float32", STORED, volatile=False)

    def __post_init__(self) -> None:
        """Checks the protocol too."""
        super().__post_init__()
        features, ks = self.features, self.num_neighbors
        check(
            (features is None or len(features) > 0, "--features: name at least one"),
            (features is None or len(set(features)) == len(features), "--features: each once"),
            (ks is None or len(ks) > 0, "--k: name at least one"),
            (ks is None or all(k >= 1 for k in ks), "--k must be at least 1"),
            (ks is None or len(set(ks)) == len(ks), "--k: name each one once"),
            (
                0.01 <= self.temperature <= 100,
                "--temperature must be in [0.01, 100]: below, one neighbour decides alone",
            ),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetrieveConfig(TransferConfig):
    """Nearest training images (paper, section 4.2, the retrieval figure)."""

    PROG = "transfer/retrieve.py"
    DESCRIPTION = """
    Image retrieval. Without --query: the nearest training images of all validation
    images, the paper's figure of the best and the worst cases (section 4.2) as an
    HTML page and a PNG, and a map of their features (t-SNE). With --query: the
    images nearest to given ones in any folder of images, with their paths and cosine
    similarities.
    """
    EPILOG = """
    examples:
      python transfer/retrieve.py                               newest run, on its own images
      python transfer/retrieve.py --data /data/imagenet --num-cases 8
      python transfer/retrieve.py --query cat.jpg dog.jpg --data ~/Pictures
    The features of a folder are computed once and kept in runs/features, so that a
    second query is immediate. Pages (retrieval.html; query.html for given files) are
    one file each and need no network.
    """

    query: tuple[str, ...] = protocol_option(
        (),
        "image files to find neighbours of, in any folder of images named by --data; without it, "
        "the validation images are the queries and the figure shows the best and worst of them",
        metavar="FILE",
    )
    features: str | None = protocol_option(
        None,
        "embedding if the network has one, else backbone; or a stage, averaged",
        choices=FEATURE_CHOICES,
    )
    num_neighbors: int = protocol_option(
        10, "images shown for a query; the paper's figure has ten", aliases=["-k", "--k"]
    )
    num_cases: int = protocol_option(5, "best cases, and as many worst cases, in the figure")
    num_mapped: int = run_option(
        2000, "validation images on the map of features (t-SNE), with thumbnails; 0: no map"
    )
    precision: Precision = run_option("float32", STORED, volatile=False)

    def __post_init__(self) -> None:
        """Checks the protocol too."""
        super().__post_init__()
        check(
            (1 <= self.num_neighbors <= 100, "--num-neighbors must be in 1 to 100"),
            (1 <= self.num_cases <= 100, "--num-cases must be in 1 to 100"),
            (0 <= self.num_mapped <= 2000, "--num-mapped must be in 0 to 2000"),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedConfig(TransferConfig):
    """Features of a folder of images for other programs."""

    PROG = "transfer/embed.py"
    DESCRIPTION = """
    Writes the features of every image of a data set: a table of numbers (.npy) and,
    row by row, the image, its split and its class (.csv).
    """
    EPILOG = """
    examples:
      python transfer/embed.py --data photos/                   newest run
      python transfer/embed.py --data photos/ --weights timm:convnext_tiny --features stage3
      python transfer/embed.py --data photos/ --normalize       rows of length one
    From Python: instdisc.embed("photos/", "timm:convnext_tiny").
    Features are kept in runs/features; a stopped command goes on where it was. The files
    are named after the data and the features, <output>/photos-backbone.npy and .csv.
    """

    features: str = protocol_option(
        "backbone",
        "pooled features before the projection; embedding: the learned output; conv1..conv5, or "
        "stageN or blockN of a timm network: averaged maps",
        choices=FEATURE_CHOICES,
    )
    normalize: bool = protocol_option(
        False, "rows of length one, as kNN and retrieval compare them; else as the network gives"
    )
    split: Literal["all", "train", "val"] = protocol_option(
        "all", "which images; all is train/ and then val/, where there is one"
    )
    precision: Precision = run_option(
        "float32", "of the table; half takes half the space", volatile=False
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FewshotConfig(TransferConfig):
    """Few-shot classification by the nearest class mean (Ericsson et al. 2021)."""

    PROG = "transfer/fewshot.py"
    DESCRIPTION = """
    Few-shot classification as Ericsson et al. (2021) measure it: an episode draws
    five classes, a few images of each to learn from and fifteen others to classify;
    an image gets the class whose mean is nearest in feature space. Mean accuracy of
    600 episodes with its 95% interval. Nothing is trained.
    """
    EPILOG = """
    examples:
      python transfer/fewshot.py                                newest run, on its own images
      python transfer/fewshot.py --data /data/eurosat --weights timm:resnet50.a1_in1k
      python transfer/fewshot.py --data /data/cub --ways 20 --shots 1 5 --episodes 1000
    Any image folder with classes will do. Features are computed once and kept in
    runs/features. Episodes are drawn by seed and number alone: every network sees the same.
    """

    features: str = protocol_option(
        "backbone",
        "pooled features before the projection; embedding: the learned output; conv1..conv5, or "
        "stageN or blockN of a timm network: averaged maps",
        choices=FEATURE_CHOICES,
    )
    normalize: bool = protocol_option(
        False, "bring rows to length one first; published numbers take them as they are"
    )
    ways: int = protocol_option(5, "classes of an episode")
    shots: tuple[int, ...] | None = protocol_option(
        None,
        f"images of a class to learn from; {', '.join(map(str, SHOTS))} if not given, as far as "
        "the images go",
        metavar="N",
    )
    queries: int = protocol_option(15, "images of a class to classify")
    episodes: int = protocol_option(600, "for each number of shots")
    split: Literal["all", "train", "val"] | None = protocol_option(
        None, "which images; those of val/ if not given, or all where it has too few of a class"
    )
    precision: Precision = run_option("float32", STORED, volatile=False)

    def __post_init__(self) -> None:
        """Checks the protocol too."""
        super().__post_init__()
        shots = self.shots
        check(
            (self.ways >= 2, "--ways must be at least 2"),
            (
                shots is None or 0 < len(set(shots)) == len(shots),
                "--shots: name at least one, and each once",
            ),
            (shots is None or min(shots) >= 1, "--shots must be at least 1"),
            (self.queries >= 1, "--queries must be at least 1"),
            (self.episodes >= 2, "--episodes must be at least 2: one has no interval"),
        )
