"""What the documents tell a user to type is what the commands accept; links lead somewhere."""

import re
import shlex
from pathlib import Path

import pytest

import pretrain.export
import pretrain.import_weights
import pretrain.run
import transfer.detect
import transfer.embed
import transfer.fewshot
import transfer.knn
import transfer.linear
import transfer.report
import transfer.retrieve
import transfer.semisup
import transfer.suite
import transfer.voc_svm
from instdisc.cli import build_parser
from pretrain.config import PretrainConfig

REPO = Path(__file__).resolve().parents[1]
TRANSFER = [
    *(transfer.detect, transfer.embed, transfer.fewshot, transfer.knn, transfer.linear),
    *(transfer.report, transfer.retrieve, transfer.semisup, transfer.suite, transfer.voc_svm),
]
DOCUMENTS = [
    path.relative_to(REPO).as_posix()
    for pattern in ("*.md", "docs/*.md", "docs/results/*.md")
    for path in sorted(REPO.glob(pattern))
]
COMMANDS = [pretrain.run, pretrain.export, pretrain.import_weights, *TRANSFER]


def commands(text: str, script: str) -> list[list[str]]:
    """Arguments of every `... script ...` line in the code blocks of a document."""
    found = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.M | re.S):
        if language:
            continue
        for line in block.replace("\\\n", " ").splitlines():
            if script in line:
                words = shlex.split(line, comments=True)
                found.append(words[words.index(script) + 1 :])
    return found


@pytest.mark.parametrize("document", DOCUMENTS)
def test_pretraining_commands_in_the_documents_parse(document: str, repo: Path) -> None:
    parser = build_parser(PretrainConfig)
    for argv in commands((repo / document).read_text(), "pretrain/run.py"):
        parser.parse_args(argv)


def test_the_readme_shows_what_must_work(repo: Path) -> None:
    text = (repo / "README.md").read_text()
    first_screen = text.partition("\n## ")[0]
    assert "make demo" in first_screen
    assert "make test" in first_screen
    assert ["--arch", "resnet50"] in commands(text, "pretrain/run.py")
    assert ["--labeled", "0.01"] in commands(text, "transfer/semisup.py")
    assert ["--cfg", "detection_configs/faster_r50.yaml"] in commands(text, "transfer/detect.py")
    assert len(commands(text, "pretrain/run.py")) >= 4
    assert commands(text, "pretrain/export.py")
    assert commands(text, "pretrain/import_weights.py")


def anchors(text: str) -> set[str]:
    """The names that headings get: lower case, words and hyphens."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    titles = re.findall(r"^#+ +(.*?) *$", text, flags=re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(path: Path) -> list[str]:
    """Links of a document to files or headings that are not there; addresses are not followed."""
    text = path.read_text("utf-8")
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)|(?:href|src)=\"([^\"]+)\"", text):
        target, _, anchor = (link[0] or link[1]).partition("#")
        if ":" in target:
            continue
        file = path.parent / target if target else path
        if not file.exists() or (anchor and anchor not in anchors(file.read_text("utf-8"))):
            broken.append(f"{target}#{anchor}".rstrip("#"))
    return broken


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str, repo: Path) -> None:
    assert broken_links(repo / document) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    (tmp_path / "b.md").write_text("# Who owns `it`, and when\n```\n# no heading\n```\n")
    page.write_text("[x](b.md) [x](b.md#who-owns-it-and-when) [x](https://a.b/c#d) [x](#y)\n# Y\n")
    assert broken_links(page) == []
    page.write_text('[x](c.md) [x](b.md#no-heading) [x](#z)\n<img src="d.png">\n# Y\n')
    assert broken_links(page) == ["c.md", "b.md#no-heading", "#z", "d.png"]


@pytest.mark.parametrize("module", COMMANDS)
def test_help_teaches(module: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        module.main(["--help"])  # type: ignore[attr-defined]
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "default" in text
    assert len(text.splitlines()) > 10
