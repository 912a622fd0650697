"""Proposals for Fast R-CNN: make them by selective search, import them, check them.

python transfer/proposals.py make --voc-root VOCdevkit --split trainval
python transfer/proposals.py import voc_2007_test.mat --voc-root VOCdevkit --split test
python transfer/proposals.py check proposals.pkl --voc-root VOCdevkit --split test
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from instdisc.cli import Parser
from instdisc.errors import UserError, explain
from instdisc.names import VOC_VARIABLE
from transfer.detection.proposals import (
    Proposals,
    check_proposals,
    from_detectron_pkl,
    from_mat,
    make_proposals,
    proposal_file,
    read_proposals,
    recall,
    write_proposals,
)
from transfer.detection.voc import Record, VocSplit, find_class_names, read_voc


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; 2 if the user has something to mend."""
    args = _build_parser().parse_args(argv)
    try:
        split = VocSplit(args.voc_root, args.year, args.split)
        # First, so that a damaged data set is known before hours of work.
        names = find_class_names(split.root, split.year, [split.split])
        records = read_voc(split.root, split.year, split.split, names)
        if args.command == "check":
            proposals = read_proposals(args.file)
        else:
            source = args.mode if args.command == "make" else "imported"
            out = args.out or proposal_file(split, source)
            if args.command == "make":
                proposals = make_proposals(split, out, args.workers, args.mode)
            else:
                proposals = _import_files(args.files, split.ids)
                check_proposals(proposals, records)  # a wrong file must not reach the disk
                write_proposals(out, proposals.ids, proposals.boxes, proposals.scores)
            sys.stdout.write(f"wrote {out}\n")
        _print_summary(proposals, records)
    except (UserError, OSError, MemoryError) as error:
        line = str(error) if isinstance(error, UserError) else explain(error)
        if line is None:
            raise
        sys.stderr.write(f"transfer/proposals.py: error: {line}\n")
        return 2
    return 0


def _build_parser() -> argparse.ArgumentParser:
    shared = Parser(add_help=False)
    shared.add_argument(
        "--voc-root",
        type=Path,
        default=Path(os.environ.get(VOC_VARIABLE, "datasets")),
        help="VOCdevkit, its parent, or a folder in VOC layout (default: $DETECTRON2_DATASETS)",
    )
    shared.add_argument("--year", default="2007", help="2007 or 2012 (default: %(default)s)")
    shared.add_argument("--split", default="trainval", help="a list (default: %(default)s)")
    writes = Parser(add_help=False)
    writes.add_argument("--out", type=Path, help="the file to write (default: in runs/proposals)")

    parser = Parser(prog="transfer/proposals.py", description="Proposals for Fast R-CNN.")
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make", parents=[shared, writes], help="run selective search")
    make.add_argument("--mode", choices=("fast", "quality"), default="fast")
    make.add_argument(
        "-j", "--workers", type=int, default=os.cpu_count() or 1, help="(default: %(default)s)"
    )
    imports = commands.add_parser(
        "import", parents=[shared, writes], help="read selective-search .mat or Detectron .pkl"
    )
    imports.add_argument("files", nargs="+", type=Path, metavar="FILE")
    check = commands.add_parser("check", parents=[shared], help="check a file, print its recall")
    check.add_argument("file", type=Path, metavar="FILE")
    return parser


def _import_files(files: Sequence[Path], ids: Sequence[str]) -> Proposals:
    readers = {".mat": from_mat, ".pkl": from_detectron_pkl, ".pickle": from_detectron_pkl}
    parts = []
    for file in files:
        reader = readers.get(file.suffix.lower())
        if reader is None:
            raise UserError(f"{file} has no known ending: expected .mat or .pkl")
        parts.append(reader(file, ids))
    merged = Proposals.build(
        [i for part in parts for i in part.ids],
        [boxes for part in parts for boxes in part.boxes],
        [scores for part in parts for scores in part.scores],
    )
    return merged.select(ids)


def _print_summary(proposals: Proposals, records: Sequence[Record]) -> None:
    summary = check_proposals(proposals, records)
    sys.stdout.write(
        f"{summary.num_images} images, {summary.num_boxes} boxes, for an image "
        f"{summary.fewest} to {summary.most}, median {summary.median:g}\n"
    )
    for note in summary.notes:
        sys.stdout.write(f"note: {note}\n")
    for limit in (None, 2000, 1000):
        if limit is not None and summary.most <= limit:
            continue
        shares = recall(proposals, records, max_boxes=limit).items()
        text = ", ".join(f"{share:.4f} at IoU {threshold:g}" for threshold, share in shares)
        sys.stdout.write(f"recall of {'all' if limit is None else f'the best {limit}'}: {text}\n")


if __name__ == "__main__":
    sys.exit(main())
