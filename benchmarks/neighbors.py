"""Exact top-k of a long bank: ours against the bare matrix product and against its peers.

python benchmarks/neighbors.py [--quick | --n 100000] [--data gaussian clustered] [--batch 256]

Every method gets the same queries in the same batches. All methods run in one process on the same
data, in turn, several rounds; a ratio is the median over rounds of one method's time over that of
the bare product in the same round. What a method does with the bank once, such as faiss's copy, is
not timed. Peak memory is that of a process for each method: the growth of its resident high-water
mark over all it does, after a small search has loaded the libraries. Waiting threads sleep
(OMP_WAIT_POLICY=passive), for all methods alike: spinning ones say more about other load on the
machine than about the method.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FLOOR = "bare product"
OURS = "instdisc top_k"
# The nearest rows of a batch of queries; and what makes that of a bank and k.
Search = Callable[[Any], Any]
Method = Callable[[Any, int], Search]


def build_data(kind: str, num_rows: int, num_queries: int, dim: int) -> tuple[Any, Any]:
    """Unit rows: queries (Q, D) and bank (N, D), the latter sorted by class if clustered."""
    import torch

    torch.manual_seed(0)
    bank, queries = torch.randn(num_rows, dim), torch.randn(num_queries, dim)
    if kind == "clustered":
        # 1,281 rows a class, as in ImageNet; within a class the cosine is about a half.
        centres = torch.randn(max(1, num_rows // 1281), dim)
        bank += centres[(torch.arange(num_rows) * len(centres)) // num_rows]
        queries += centres[torch.randint(len(centres), (num_queries,))]
    for rows in (bank, queries):
        rows /= rows.norm(dim=1, keepdim=True)
    return queries, bank


def bare_product(bank: Any, k: int) -> Search:
    """The floor: every similarity, into one reused buffer, and nothing done with it."""
    import torch

    buffer = torch.empty(0)

    def search(queries: Any) -> None:
        buffer.resize_(len(queries), 16384)
        for chunk in bank.split(16384):
            torch.mm(queries, chunk.T, out=buffer[:, : len(chunk)])

    return search


def ours(bank: Any, k: int) -> Search:
    """`instdisc.neighbors.vote.top_k` with its default budget."""
    from instdisc.neighbors.vote import top_k

    return lambda queries: top_k(queries, bank, num_neighbors=k)[1]


def big_matmul(bank: Any, k: int) -> Search:
    """All similarities, then topk."""
    return lambda queries: (queries @ bank.T).topk(k, dim=1).indices


def chunked_topk(bank: Any, k: int) -> Search:
    """Topk of each chunk, and of what these leave."""
    import torch

    def search(queries: Any) -> Any:
        values, rows = [], []
        for start in range(0, len(bank), 16384):
            best = (queries @ bank[start : start + 16384].T).topk(min(k, len(bank) - start), dim=1)
            values.append(best.values)
            rows.append(best.indices + start)
        order = torch.cat(values, dim=1).topk(k, dim=1).indices
        return torch.cat(rows, dim=1).gather(1, order)

    return search


def faiss_flat(bank: Any, k: int) -> Search:
    """IndexFlatIP over a copy of the bank."""
    import faiss
    import torch

    index = faiss.IndexFlatIP(bank.shape[1])
    index.add(bank.numpy())
    return lambda queries: torch.from_numpy(index.search(queries.numpy(), k)[1])


def sklearn_brute(bank: Any, k: int) -> Search:
    """Brute-force neighbours by Euclidean distance, its fastest: the same order on unit rows."""
    import torch
    from sklearn.neighbors import NearestNeighbors

    model = NearestNeighbors(n_neighbors=k, algorithm="brute").fit(bank.numpy())
    return lambda queries: torch.from_numpy(
        model.kneighbors(queries.numpy(), return_distance=False)
    )


METHODS: dict[str, Method] = {
    FLOOR: bare_product,
    OURS: ours,
    "torch matmul + topk": big_matmul,
    "torch topk per chunk": chunked_topk,
    "faiss-cpu IndexFlatIP": faiss_flat,
    "scikit-learn brute": sklearn_brute,
}


def chosen(args: argparse.Namespace) -> list[str]:
    """The methods to compare: the bare product and ours always."""
    return [name for name in METHODS if name in (FLOOR, OURS) or args.peers in ("all", name)]


def search_all(search: Search, queries: Any, batch: int) -> Any:
    """The nearest rows of all queries, one batch after another; None where nothing is found."""
    import torch

    found = [search(part) for part in queries.split(batch)]
    return None if found[0] is None else torch.cat(found)


def measure_times(args: argparse.Namespace, kind: str) -> dict[str, Any]:
    """Milliseconds a query of each method in each round, and agreement with ours."""
    queries, bank = build_data(kind, args.n, args.queries, args.dim)
    searches = {name: METHODS[name](bank, args.k) for name in chosen(args)}
    times: dict[str, list[float]] = {name: [] for name in searches}
    # Not timed: the first searches load libraries.
    found = {name: search_all(search, queries, args.batch) for name, search in searches.items()}
    for _ in range(args.rounds):
        for name, search in searches.items():
            started = time.perf_counter()
            search_all(search, queries, args.batch)
            times[name].append((time.perf_counter() - started) * 1e3 / args.queries)
    rows = {}
    for name, values in times.items():
        row: dict[str, Any] = {"ms_per_query": statistics.median(values), "rounds": values}
        row["ratio"] = statistics.median(
            value / floor for value, floor in zip(values, times[FLOOR], strict=True)
        )
        if found[name] is not None:
            same = found[name].sort(dim=1).values == found[OURS].sort(dim=1).values
            row["same_rows_as_ours"] = float(same.float().mean())
        rows[name] = row
    return rows


def measure_memory(args: argparse.Namespace, kind: str, name: str) -> float:
    """Growth in MB of this process's resident high-water mark over all that a method does."""
    queries, bank = build_data(kind, args.n, args.queries, args.dim)
    METHODS[name](bank[:1000], min(args.k, 1000))(queries[:2])
    # The kernel keeps the highest value ever; building the data must not hide the search.
    Path("/proc/self/clear_refs").write_text("5")
    before = _high_water()
    search_all(METHODS[name](bank, args.k), queries, args.batch)
    return (_high_water() - before) / 1e6


def _high_water() -> int:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def run_child(args: argparse.Namespace) -> None:
    """One measurement, printed as JSON: the parent starts it with its environment set."""
    import torch

    torch.set_num_threads(args.threads)
    kind, _, method = args.child.partition(":")
    result = measure_memory(args, kind, method) if method else measure_times(args, kind)
    print(json.dumps(result))


def ask_child(args: argparse.Namespace, what: str) -> Any:
    """Run one measurement in a fresh process and return what it found."""
    environment = os.environ | {
        "OMP_NUM_THREADS": str(args.threads),
        "OPENBLAS_NUM_THREADS": str(args.threads),
        "OMP_WAIT_POLICY": "passive",
    }
    options = ("n", "queries", "batch", "dim", "k", "rounds", "threads", "peers")
    command = [sys.executable, __file__, "--child", what]
    for option in options:
        command += [f"--{option}", str(getattr(args, option))]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measures, prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--n", type=int, default=None, help="bank rows (default: 1,281,167)")
    parser.add_argument("--queries", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=256, help="queries at a time")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--k", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=None, help="default: 5; 3 with --quick")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--data", nargs="+", help="gaussian, clustered (default: both)")
    parser.add_argument("--peers", default="all", help="all, none, or the name of one")
    parser.add_argument("--quick", action="store_true", help="100,000 clustered rows")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/neighbors.json"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.n = args.n or (100_000 if args.quick else 1_281_167)
    args.rounds = args.rounds or (3 if args.quick else 5)
    args.data = args.data or (["clustered"] if args.quick else ["gaussian", "clustered"])
    if args.child:
        return run_child(args)
    from instdisc.runs.folders import provenance, write_json

    settings = ("n", "queries", "batch", "dim", "k", "threads")
    report: dict[str, Any] = {
        "settings": {key: getattr(args, key) for key in settings},
        "memory": "growth of the resident high-water mark, one process a method",
        "provenance": provenance(),
    }
    for kind in args.data:
        rows = ask_child(args, kind)
        words = f"{args.queries} queries, {args.batch} at a time, k = {args.k}"
        print(f"\n{kind}: {args.n} x {args.dim}, {words}")
        print(f"{'':24}{'ms a query':>11}{'ratio':>8}{'peak MB':>9}{'same rows':>11}")
        for name, row in rows.items():
            row["peak_extra_mb"] = ask_child(args, f"{kind}:{name}")
            same = row.get("same_rows_as_ours")
            print(
                f"{name:24}{row['ms_per_query']:11.3f}{row['ratio']:8.2f}"
                f"{row['peak_extra_mb']:9.0f}{'' if same is None else f'{same:.5f}':>11}",
                flush=True,
            )
        report[kind] = rows
    write_json(args.output, report)
    print(f"\nratio: time over that of the bare product; written to {args.output}")


if __name__ == "__main__":
    main()
