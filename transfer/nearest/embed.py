"""Features of a folder of images for other programs: a .npy table and a .csv of its rows."""

from pathlib import Path

from instdisc.features.embed import SPLITS, embed_sets, paths_of
from instdisc.images.sets import has_split
from instdisc.runs.log import LOGGER
from transfer.nearest.knn import build_store
from transfer.nearest.settings import EmbedConfig
from transfer.task import open_task


def run_embed(config: EmbedConfig) -> tuple[Path, Path]:
    """The command: computes what is not stored, and writes both files."""
    with open_task("embed", config) as task:
        present = [split for split in SPLITS if has_split(task.location, split)]
        sets = [task.load_split(s) for s in (present if config.split == "all" else [config.split])]
        found = embed_sets(
            task.weights,
            sets,
            build_store(task, config.precision),
            features=config.features,
            normalize=config.normalize,
        )
        path = task.output / f"{sets[0].dataset}-{config.features}"
        if task.is_main:
            found.save(path)
            rows, width = found.features.shape
            table, listing = paths_of(path)
            LOGGER.info(f"{rows:,} rows of {width} values: {table}\ntheir images: {listing}")
        return paths_of(path)
