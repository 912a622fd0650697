"""The start of a run on many files: how often the system is asked, and what a second start takes.

python benchmarks/listing.py [--quick] [--files 200000] [--folders 200] [--processes 2]

Makes an ImageFolder of small files (a listing looks at no content), then opens it as training does,
in several processes, twice: the first start lists the folder and keeps the listing, the second one
finds it kept. Seconds are those of the first process, without the start of Python and torch; calls
are counted at the two functions through which a listing asks about files and folders.
"""

import argparse
import multiprocessing
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

from instdisc.images import catalog, listing
from instdisc.images.locations import locate_data
from instdisc.images.sets import load_images
from instdisc.runs.folders import provenance, write_json
from instdisc.training import dist


def write_files(root: Path, files: int, folders: int) -> None:
    """Class folders of hard links to a small file each, old enough for a listing to be kept."""
    for number in range(folders):
        folder = root / "train" / f"n{number:08d}"
        folder.mkdir(parents=True)
        first, *others = (
            folder / f"n{number:08d}_{index}.JPEG" for index in range(number, files, folders)
        )
        first.write_bytes(b"x" * (1 + number))
        for link in others:
            link.hardlink_to(first)
    time.sleep(catalog.SETTLED / 1e9 + 0.1)


def start(data: Path, rank: int, count: int, port: int, results: Any) -> None:
    """One process of a run: opens the images, and tells what it did."""
    if count > 1:
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count}
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in {**ranks, **place}.items()}
    dist.init_process("cpu")
    calls = {"files": 0, "folders": 0, "listings": 0}

    def count_calls(module: Any, function: str, what: str) -> None:
        inner = getattr(module, function)

        def counted(*args: Any) -> Any:
            calls[what] += 1
            return inner(*args)

        setattr(module, function, counted)

    for module in (listing, catalog):
        count_calls(module, "find_size", "files")
        count_calls(module, "find_state", "folders")
    count_calls(catalog, "list_images", "listings")
    location = locate_data(str(data))
    dist.barrier()
    started, worked = time.perf_counter(), time.process_time()
    images = dist.from_first(lambda: load_images(location, "train"))
    seconds, processor = time.perf_counter() - started, time.process_time() - worked
    results.put(
        {
            "rank": rank,
            "images": len(images),
            "seconds": round(seconds, 4),
            "processor_seconds": round(processor, 4),
            "fingerprint": images.fingerprint,
            **calls,
        }
    )
    dist.close()


def run(data: Path, processes: int) -> list[dict[str, Any]]:
    """Starts the processes of a run; what each tells, in their order."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = [
        context.Process(target=start, args=(data, rank, processes, port, results))
        for rank in range(processes)
    ]
    for child in children:
        child.start()
    told = [results.get(timeout=600) for _ in children]
    for child in children:
        child.join()
    return sorted(told, key=lambda row: row["rank"])


def main() -> None:
    """Measures, prints the table, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--files", type=int, default=None, help="default: 200000; 20000 if quick")
    parser.add_argument("--folders", type=int, default=200)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/listing.json"))
    args = parser.parse_args()
    files = args.files or (20_000 if args.quick else 200_000)
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["INSTDISC_RUNS"] = str(Path(scratch) / "runs")
        write_files(Path(scratch) / "data", files, args.folders)
        starts = {name: run(Path(scratch) / "data", args.processes) for name in ("first", "second")}
    first, second = starts["first"][0], starts["second"][0]
    everyone = [row for rows in starts.values() for row in rows]
    report: dict[str, Any] = {
        "files": files,
        "folders": args.folders,
        "processes": args.processes,
        "calls_per_file": round(first["files"] / files, 4),
        "listing_processes": sum(row["listings"] > 0 for row in starts["first"]),
        "first_seconds": first["seconds"],
        "second_seconds": second["seconds"],
        "ratio": round(first["seconds"] / second["seconds"], 1),
        "same_images": len({row["fingerprint"] for row in everyone}) == 1,
        "starts": starts,
        "provenance": provenance(),
    }
    write_json(args.output, report)
    print(f"{files:,} files in {args.folders} folders, {args.processes} processes")
    print(f"{'':8}{'process':>8}{'seconds':>9}{'cpu':>8}{'files':>9}{'folders':>9}{'listings':>9}")
    for name, rows in starts.items():
        for row in rows:
            print(
                f"{name:8}{row['rank']:8}{row['seconds']:9.3f}{row['processor_seconds']:8.3f}"
                f"{row['files']:9,}{row['folders']:9,}{row['listings']:9}"
            )
    print(f"calls a file {report['calls_per_file']}, {report['listing_processes']} process lists")
    print(f"ratio of first start to second: {report['ratio']}; same: {report['same_images']}")
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()
