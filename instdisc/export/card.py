"""The model card of an exported network: README.md, in the form that the Hugging Face hub reads."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from instdisc.runs.results import Result, summarize

# Of a pretraining's config, what a reader wants to know first; the whole is in the run folder.
RECIPE = (
    *("objective", "temperature", "num_negatives", "negatives", "normalizer", "proximal_weight"),
    *("bank_momentum", "embedding_dim", "epochs", "batch_size", "optimizer", "lr", "lr_milestones"),
    *("weight_decay", "image_size", "stem", "train_fraction", "seed"),
)
PAPER = "https://arxiv.org/abs/1805.01978"
CARD = """---
library_name: timm
pipeline_tag: image-feature-extraction
license: unknown
tags:
- timm
- image-feature-extraction
- instance-discrimination
{datasets}---

# {title}

A {arch} backbone without classes, {how}

```python
import timm
{imports}
model = timm.create_model("local-dir:FOLDER", pretrained=True)  # or "hf-hub:OWNER/NAME"
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
features = model(transform(image).unsqueeze(0))  # (1, {width})
```

## Data

{data}

## Recipe

{recipe}

## Results

{results}

## Licence

None is chosen yet: replace `license: unknown` above before you publish the weights, and mind the
terms of the images that they were trained on.

## Source

Weights {sha} (SHA-256), exported by instdisc. Method: [Wu, Xiong, Yu, Lin, CVPR 2018]({paper}).
"""


def _text(value: object) -> str:
    """A value inside Markdown: it neither ends a cell nor becomes markup or HTML."""
    return re.sub(r"([\\`*_{}\[\]<>|#&])", r"\\\1", re.sub(r"\s+", " ", str(value)))


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    return "\n".join(lines + [f"| {' | '.join(map(_text, row))} |" for row in rows])


def _results(rows: Sequence[Result]) -> str:
    if not rows:
        return (
            "None yet: measure with `transfer/suite.py`, then export again with `--overwrite`, "
            "which fills this table."
        )
    found = [
        (row.task, row.dataset, row.protocol, row.metric, str(measured))
        for row, measured in summarize(rows)
    ]
    demo = " Those of `demo` are of embedded images and say nothing of the method."
    note = "Mean ± standard deviation (n repetitions), in percent where the metric is one."
    head = ("task", "data", "protocol", "metric", "value")
    return note + demo * any(row.is_demo for row in rows) + "\n\n" + _table(head, found)


def _describe_data(pretraining: Mapping[str, Any]) -> str:
    data, epoch = pretraining.get("dataset"), pretraining.get("epoch")
    if not data:
        return "Unknown: the checkpoint does not say."
    fingerprint = str(pretraining.get("data_fingerprint", ""))[:16]
    length = f", {epoch:g} epochs" if isinstance(epoch, int | float) else ""
    return f"{_text(data)}, images {fingerprint} (fingerprint){length}."


def write_card(
    *,
    arch: str,
    width: int,
    needs_import: bool,
    sha256: str,
    pretraining: Mapping[str, Any],
    rows: Sequence[Result],
) -> str:
    """The text of the card.

    Args:
        arch: the network.
        width: of its features.
        needs_import: whether timm knows the network only after an import of this project.
        sha256: of its weights.
        pretraining: what the checkpoint knows of it; empty where it was imported.
        rows: what was measured of it.
    """
    config = pretraining.get("config") or {}
    data = pretraining.get("dataset")
    recipe = [(name.replace("_", " "), config[name]) for name in RECIPE if name in config]
    trained = "pretrained without labels by instance discrimination."
    return CARD.format(
        datasets=f"datasets:\n- {json.dumps(str(data))}\n" if data else "",
        title=_text(f"{arch}, {config.get('objective', 'imported weights')}"),
        arch=_text(arch),
        how=trained if "objective" in config else "imported from another project's checkpoint.",
        imports="import instdisc.export.to_timm  # registers the network\n" if needs_import else "",
        width=width,
        data=_describe_data(pretraining),
        recipe=_table(("setting", "value"), recipe) if recipe else "Unknown.",
        results=_results(rows),
        sha=sha256,
        paper=PAPER,
    )
