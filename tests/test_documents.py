"""Every result in the documents can be traced to a file of docs/results/ or to a cited source.

A comment before a paragraph, list or table says where its numbers come from:

    <!-- from docs/results/NAME.json -->     all of them stand in that file; or in: a.json, b.jsonl
    <!-- from pretrain/config.py -->         all of them stand in that code, or .yaml: real defaults
    <!-- from transfer/reporting/paper_numbers.py -->  all of them are published ones
    <!-- source: WORDS -->                   numbers of others, or derived ones; the words say whose
    <!-- settings -->                        numbers that were chosen, not measured

With `, section` at its end a comment holds to the next heading. What counts as a number, outside
code: one with decimals, a percent sign, or a unit of time, size, rate or gain. Where a comment says
`from`, every whole number from 10 on counts too; that one may stand in a string or key of the file.
"""

import ast
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from instdisc.cli import build_parser
from pretrain.config import PretrainConfig
from transfer.detection.settings import DetectConfig
from transfer.finetuning.settings import SemisupConfig
from transfer.reporting import paper_numbers
from transfer.reporting.settings import ReportConfig
from transfer.suites.settings import SuiteConfig

REPO = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    path.relative_to(REPO).as_posix()
    for pattern in ("*.md", "docs/*.md", "docs/results/*.md")
    for path in sorted(REPO.glob(pattern))
]
RESULTS = [p.relative_to(REPO).as_posix() for p in sorted(REPO.glob("docs/results/*.json*"))]
COMMENT = re.compile(r"<!--\s*(from|source:|settings)\s*(.*?)\s*-->", re.S)
UNIT = (
    r"(?:(?:ms|s|seconds?|min|minutes?|h|hours?|days?|[kMGT]B|TFLOP/s|points?|times|kills|mutations"
    r"|grey levels?)\b|images a second)"
)
NUMBER = re.compile(
    r"(?<![\w.,-])\d[\d,]*\.\d+(?![\w.])"
    rf"|(?<![\w.,^-])\d[\d,]*(?:\.\d+)?(?=\s?%|\s{UNIT})"
)
WHOLE = re.compile(r"(?<![\w.,:^+-])\d[\d,]*\d(?![\w:^+-]|\.\d)")
# Places and versions, not results.
NO_RESULT = re.compile(
    r"\b([Ss]ections?|Tables?|Python|version|CUDA|torch)\s+\d[\d.]*(\s*(,|and|or|to)\s*\d[\d.]*)*"
)


class Block(NamedTuple):
    line: int
    text: str
    kind: str | None  # from, source:, settings; None where nothing is said
    words: str


def blocks(text: str) -> Iterator[Block]:
    """Paragraphs, lists and tables with the comment that holds for them; code is left out."""
    text = re.sub(r"^```.*?^```$", lambda m: "\n" * m.group().count("\n"), text, flags=re.M | re.S)
    said: tuple[str | None, str] = (None, "")
    in_section: tuple[str | None, str] = (None, "")
    line = 1
    for part in re.split(r"(\n[ \t]*\n)", text):
        body = part.strip()
        if body.startswith("#"):
            in_section = said = (None, "")
        found = COMMENT.fullmatch(body) or COMMENT.match(body)
        if found:
            kind, words = found[1], found[2]
            if words.endswith("section") or (kind == "settings" and "section" in words):
                in_section = (kind, words.removesuffix("section").rstrip(" ,"))
            else:
                said = (kind, words)
            body = body[found.end() :].strip()
        if body:
            yield Block(line, body, *(said if said[0] else in_section))
            said = (None, "")
        line += part.count("\n")


def numbers(text: str) -> tuple[list[str], list[str]]:
    """The numbers of a block that look like results, and its other whole numbers from 10 on."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"`[^`]*`", "", text)
    text = NO_RESULT.sub("", re.sub(r"\]\([^)]*\)", "]", text))
    results = [match.group().replace(",", "") for match in NUMBER.finditer(text)]
    rest = NUMBER.sub("x", text)
    return results, [match.group().replace(",", "") for match in WHOLE.finditer(rest)]


class Stored(NamedTuple):
    values: list[float]
    said: set[str]  # whole numbers in keys and strings: what was run, not what came of it

    def has(self, shown: str) -> bool:
        """Whether a number is one of the stored ones, rounded to as many decimals as it shows.

        A percentage may be stored as a fraction.
        """
        decimals = len(shown.partition(".")[2])
        same = (f"{value:.{decimals}f}" for value in self.values)
        fractions = (f"{100 * value:.{decimals}f}" for value in self.values if 0 <= value <= 1)
        return shown in {*same, *fractions}

    def has_whole(self, shown: str) -> bool:
        """Whether a whole number is stored as it is."""
        return shown in self.said or float(shown) in self.values


def stored_numbers(value: Any) -> Iterator[float | str]:
    """All numbers of a JSON value, as numbers; those of its keys and strings as strings."""
    if isinstance(value, dict):
        yield from stored_numbers([*value, *value.values()])
    elif isinstance(value, list):
        for item in value:
            yield from stored_numbers(item)
    elif isinstance(value, str):
        yield from (match.group().replace(",", "") for match in WHOLE.finditer(value))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def code_numbers(source: str) -> Iterator[float | str]:
    """The same of the literals in Python code; 2**20 and the like are not computed."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant):
            yield from stored_numbers(node.value)


def read_numbers(name: str, repo: Path = REPO) -> list[float | str]:
    """The numbers of a file of results, of code or of a detection config; the published ones."""
    if name == "transfer/reporting/paper_numbers.py":
        tables = (v for k, v in vars(paper_numbers).items() if k.isupper())
        rows = [row for table in tables if isinstance(table, tuple) for row in table]
        found = [
            v for r in rows if isinstance(r, paper_numbers.Published) for v in r.values.values()
        ]
        return [*found, *paper_numbers.TABLE4.values(), *paper_numbers.TABLE5.values()]
    path = repo / name
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        return list(code_numbers(text))
    if path.suffix == ".yaml":
        return [float(n) for n in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.])", text)]
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    return [n for line in lines if line for n in stored_numbers(json.loads(line))]


def open_stored(names: list[str], repo: Path) -> Stored:
    found = [n for name in names for n in read_numbers(name, repo)]
    return Stored(
        [n for n in found if not isinstance(n, str)], {n for n in found if isinstance(n, str)}
    )


def untraceable(text: str, repo: Path = REPO) -> list[str]:
    """`line: number, why` for each number that cannot be traced."""
    problems = []
    for block in blocks(text):
        results, whole = numbers(block.text)
        if block.kind == "from" and (results or whole):
            names = [name.strip() for name in block.words.split(",") if name.strip()]
            missing = [n for n in names if not (repo / n).is_file()]
            if missing or not names:
                problems.append(f"{block.line}: no file {', '.join(missing) or 'is named'}")
                continue
            stored = open_stored(names, repo)
            wrong = [n for n in results if not stored.has(n)]
            wrong += [n for n in whole if not stored.has_whole(n)]
            problems += [f"{block.line}: {n} is not in {block.words}" for n in wrong]
        elif block.kind == "source:" and not block.words:
            problems.append(f"{block.line}: a source without words")
        elif block.kind is None:
            problems += [f"{block.line}: {n} has no source" for n in results]
    return problems


@pytest.mark.parametrize("document", DOCUMENTS)
def test_numbers_can_be_traced(document: str) -> None:
    problems = untraceable((REPO / document).read_text("utf-8"))
    assert not problems, "\n".join([f"{document}: mark where these come from", *problems])


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("kNN is 35.6 now", ["35.6"]),
        ("35% of them", ["35"]),
        ("<!-- from r.json -->\n\n| a | 35.6 |\n|---|---|\n| b | 41.26 |", ["41.26"]),
        ("<!-- from r.json -->\n| 35.6 | 12% |\n\nthen 35.6 again", ["35.6"]),
        ("<!-- from nowhere.json -->\n35.6", ["no file"]),
        ("<!-- from transfer/reporting/paper_numbers.py -->\n46.5 and 46.6", ["46.6"]),
        ("<!-- source: -->\n35.6", ["without words"]),
        ("<!-- settings, section -->\n\n0.07\n\n0.1\n\n## next\n\n0.2", ["0.2"]),
        ("it took 7 minutes, 40 images a second", ["7", "40"]),
        ("<!-- from r.json -->\n35.6 with 300 images and k = 200", ["300"]),
        ("<!-- from r.json -->\nin 200 seconds", ["200"]),
        ("<!-- from c.py -->\ntau 0.07, every 20 seconds, lr 0.04", ["0.04"]),
        ("<!-- from c.yaml -->\nlr 0.001 for 150,000 iterations, then 60,000", ["60000"]),
    ],
)
def test_the_walk_finds(text: str, bad: list[str], tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(
        '{"value": 35.5999, "fraction": 0.12, "row": [41.25], "what": "kNN, k 200"}'
    )
    (tmp_path / "c.py").write_text("BEAT = 20.0\n\ndef f(tau=0.07): ...\n")
    (tmp_path / "c.yaml").write_text("LR: 0.001\nSTEPS: (50000, 150000)\n")
    (tmp_path / "transfer" / "reporting").mkdir(parents=True)
    (tmp_path / "transfer" / "reporting" / "paper_numbers.py").touch()
    problems = untraceable(text, tmp_path)
    assert len(problems) == len(bad), problems
    assert all(word in problem for word, problem in zip(bad, problems, strict=True))


@pytest.mark.parametrize(
    "text",
    [
        "five of 1,281,167 images, section 4.1, Python 3.11 or 3.12, 10^8 times",
        "```\nlr 0.03\n```\n\n`--lr 0.03` and [a](x0.5.md)",
        "<!-- from r.json -->\n35.6, 35.60 and 12% of Table 12, VOC 07+12, CIFAR-10",
        "<!-- from r.jsonl, r.json -->\n7.5 and 35.6",
        "<!-- source: MoCo's README -->\nAP50 81.3",
        "<!-- settings -->\ntau 0.07",
        "<!-- settings, section -->\n\n0.07\n\n- 0.5\n- 0.2",
    ],
)
def test_the_walk_lets_pass(text: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text('{"value": 35.5999, "fraction": 0.12}')
    (tmp_path / "r.jsonl").write_text('{"value": 1}\n{"value": 7.5}\n')
    assert untraceable(text, tmp_path) == []


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """(script, arguments) of every line in the code blocks of a document that runs one."""
    for block in re.findall(r"^```\n(.*?)^```", text, flags=re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            for number, word in enumerate(words):
                if word.endswith(".py"):
                    yield word, words[number + 1 :]


def test_commands_of_the_page_are_those_of_the_suite() -> None:
    types = {
        "pretrain/run.py": PretrainConfig,
        "transfer/suite.py": SuiteConfig,
        "transfer/report.py": ReportConfig,
        "transfer/semisup.py": SemisupConfig,
        "transfer/detect.py": DetectConfig,
    }
    found = list(commands((REPO / "docs/reproduce.md").read_text("utf-8")))
    assert {script for script, _ in found} == set(types)
    for script, argv in found:
        build_parser(types[script]).parse_args(argv)


def test_defaults_of_the_pretraining_table_are_those_of_the_code() -> None:
    section = (REPO / "docs/protocols.md").read_text("utf-8").split("\n## ")[1]
    assert section.startswith("Pretraining")
    rows = [line.split("|")[2] for line in section.splitlines() if line.startswith("| ")]
    spans = " ".join(span for row in rows for span in re.findall(r"`([^`]*)`", row))
    shown = re.findall(r"--([a-z-]+) (\d[\d.e-]*)", spans)
    assert len(shown) > 5
    for flag, value in shown:
        assert getattr(PretrainConfig(), flag.replace("-", "_")) == float(value), flag


def test_costs_follow_from_their_inputs() -> None:
    stored = json.loads((REPO / "docs/results/costs.json").read_text("utf-8"))
    given: dict[str, Any] = {name: each["value"] for name, each in stored["inputs"].items()}
    assert all(each["source"] for each in stored["inputs"].values())
    hours, images = stored["gpu_hours"], given["imagenet_train"]
    share = given["forward_units_here"] / given["forward_units_moco"]
    unit = given["moco_gpus"] * given["moco_hours"] * share / given["gflops"]["resnet50"]
    full = {arch: unit * gflops for arch, gflops in given["gflops"].items()}
    forward = {arch: value / 200 / 3 for arch, value in full.items()}
    per_image = given["detector_gpus"] * given["detector_seconds"] / given["detector_batch"] / 3600
    parts = sum(given["semisup_fractions"]) * given["semisup_epochs"]
    expected = {
        "pretrain_all_four": sum(full.values()),
        "cifar_six": 6 * unit * given["gflops_cifar_resnet18"] * 50_000 / images,
        "table4_more": 3 * full["resnet18"],
        "table5_more": sum(given["table5_fractions"]) * full["resnet18"],
        "forward_imagenet_all_four": sum(forward.values()) * (1 + given["imagenet_val"] / images),
        "forward_places_all_four": sum(forward.values()) * given["places_images"] / images,
        "semisup_resnet50": parts / 200 * full["resnet50"],
        "detect_resnet50": given["detector_iterations"] * 2 * per_image,
        "detect_resnet50_0712": given["detector_iterations_0712"] * 16 * per_image,
    }
    for name, value in expected.items():
        assert hours[name] == pytest.approx(value, abs=1e-3), name
    assert hours["pretrain"] == pytest.approx(full, abs=1e-3)
    numbers_of_an_image = given["probe_numbers"] * given["probe_stages"]
    disk = images * numbers_of_an_image * given["probe_bytes"] / 1e9
    assert stored["disk_gb"]["probes_imagenet"] == pytest.approx(disk, abs=1e-3)


def plan(given: dict[str, float], images: int, gpus: int, batch: int) -> dict[str, float]:
    """The formulas of docs/performance.md."""
    bank, ring = 4 * images * given["dimensions"], 2 * (gpus - 1) / gpus
    network = batch / gpus / given["network_images_per_second"]
    softmax = batch * bank / gpus / given["flops"]
    softmax += (
        given["softmax_passes_bytes"] * batch * images / gpus / given["memory_bytes_per_second"]
    )
    sampled = ring * 2 * given["sampled_negatives"] * given["dimensions"]
    alone, both = (images / batch * step for step in (network, network + softmax))
    return {
        **{"images": images, "gpus": gpus, "batch": batch},
        "bank_float32_gb": bank / 1e9,
        "bank_float16_gb": bank / 2 / 1e9,
        "shard_float16_gb": bank / 2 / gpus / 1e9,
        "network_ms": network * 1e3,
        "softmax_ms": softmax * 1e3,
        "softmax_seconds": softmax,
        "shared_noise_mb": ring * 2 * given["num_negatives"] * given["dimensions"] / 1e6,
        "sampled_mb": sampled / 1e6,
        "sampled_ms": sampled / given["network_bytes_per_second"] * 1e3,
        "images_per_second": gpus * given["network_images_per_second"],
        "epoch_network_minutes": alone / 60,
        "epoch_network_hours": alone / 3600,
        "epoch_softmax_minutes": both / 60,
        "epoch_softmax_hours": both / 3600,
        "epoch_softmax_days": both / 86400,
        "permutation_gb": 8 * images / 1e9,
        "noise_uneven": 1 / (2 ** int(given["generator_bits"]) // images),
    }


def test_plans_follow_from_their_inputs() -> None:
    stored = json.loads((REPO / "docs/results/plans.json").read_text("utf-8"))
    given = {name: each["value"] for name, each in stored["inputs"].items()}
    assert all(each["source"] for each in stored["inputs"].values())
    for name in ("imagenet", "1e8", "1e9"):
        row = stored["plans"][name]
        expected = plan(given, row["images"], row["gpus"], row["batch"])
        assert row == pytest.approx(expected, rel=1e-3), name
        assert row["shard_float16_gb"] < given["gpu_memory_gb"]
    gradients = 4 * given["resnet50_parameters"] / 1e6
    assert stored["plans"]["gradients_resnet50_mb"] == pytest.approx(gradients, rel=1e-3)


@pytest.mark.parametrize("name", RESULTS)
def test_results_are_referred_to(name: str) -> None:
    """A file of results that no document names is one that nobody reads."""
    texts = {document: (REPO / document).read_text("utf-8") for document in DOCUMENTS}
    file = Path(name).name
    assert any(name in text or f"](results/{file})" in text for text in texts.values())
