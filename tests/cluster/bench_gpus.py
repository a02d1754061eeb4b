"""The whole main job on several GPUs of one host: scaling, balance, a killed worker, and the engine alone beside it.

    python -m tests.cluster.bench_gpus scale --size 1.5b --gpus 1 2 4 --prompts 3000 --kill
    python -m tests.cluster.bench_gpus alone --size 1.5b --prompts 3000
    python -m tests.cluster.bench_gpus memory --size 1.5b --prompts 200
    python -m tests.cluster.bench_gpus plot --results scale-*.txt --image gpus.png

``scale`` decodes the same prompts on every number of GPUs, each run a job of its own on one Ray; ``--kill`` sends
SIGKILL to a worker of one more run on all of them. ``alone`` is ``Engine.stream`` without Ray. ``memory`` leaves the
torch backend less and less memory until its batch does not fit. The model is a bundled one that computes its function
at a real checkpoint's shape (``specfold.enlarge``). Each call ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from cluster.config import JobConfig
from specfold import Completion, DecodeConfig, Engine, Request, reference_models
from tests.cluster.jobs import JobFolder
from tests.cluster.processes import descendants
from tests.reference_training.task import heldout_problems

SIZE, SEEN = "SPECFOLD_BENCH_SIZE", "SPECFOLD_BENCH_SEEN"
"""Environment of the workers: the model's size, and a folder where each leaves its GPU."""
SPARE = "spare_gib"
"""Beside that folder: memory to leave free."""
RAN_OUT = "ran_out_of_memory"
"""A line for each time: how many rows at a time were too many."""
MODULE = "tests.cluster.bench_gpus"


def large(folder: str, **settings: Any) -> Engine:
    """A worker's engine. Leaves a note of the process and its GPU."""
    import torch

    from jobs.bench import resize

    engine = resize(Engine.from_pretrained(folder, **settings), os.environ[SIZE])
    if SEEN in os.environ:
        gpu = str(torch.cuda.get_device_properties(0).uuid)
        Path(os.environ[SEEN], f"{os.getpid()}.json").write_text(json.dumps({"pid": os.getpid(), "gpu": gpu}))
    return engine


def tight(folder: str, **settings: Any) -> Engine:
    """The same where other buffers have taken nearly all of the GPU."""
    import torch

    engine, run = large(folder, **settings), Path(os.environ[SEEN]).parent
    spare = int(float((run / SPARE).read_text()) * 2**30)
    engine.ballast = torch.empty(  # type: ignore[attr-defined]
        max(torch.cuda.mem_get_info()[0] - spare, 0), dtype=torch.uint8, device="cuda"
    )
    stream = engine.stream

    def noted(requests: Iterable[Request | None], config: DecodeConfig, batch_size: int) -> Iterator[Completion]:
        try:
            yield from stream(requests, config, batch_size)
        except torch.OutOfMemoryError:
            with (run / RAN_OUT).open("a") as file:
                print(batch_size, file=file)
            raise

    engine.stream = noted  # type: ignore[assignment,method-assign]
    return engine


def write_prompts(path: Path, count: int) -> str:
    path.write_text("\n".join(json.dumps({"prompt": p.question}) for p in heldout_problems(count)) + "\n")
    return str(path)


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    return {"mode": args.mode, "drafts": args.drafts, "max_new_tokens": args.max_new_tokens}


def bench_alone(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds from the first to the last row of one engine that nobody else drives."""
    import torch

    from specfold.benchmark.decoding import read_questions

    os.environ[SIZE] = args.size
    engine = large(str(reference_models.path("fast_dllm_v2")), device="cuda", dtype="bfloat16", backend="triton")
    with tempfile.TemporaryDirectory() as root:
        write_prompts(Path(root, "in.jsonl"), args.prompts)
        questions = read_questions(engine, Path(root, "in.jsonl"), args.prompts)
    config = DecodeConfig(**settings_of(args))
    engine.warm_up(config, args.batch_size)
    rows = (Request(question.prompt_ids, row_id=i) for i, question in enumerate(questions))
    torch.cuda.synchronize()
    begin = time.perf_counter()
    done: list[Completion] = list(engine.stream(rows, config, args.batch_size))
    seconds = time.perf_counter() - begin
    tokens = sum(len(completion.token_ids) for completion in done)
    return {"seconds": seconds, "output_tokens": tokens, "tokens_per_s": tokens / seconds}


def bench_scale(args: argparse.Namespace) -> dict[str, Any]:
    runs: list[dict[str, Any]] = []
    with ray_of(args.size, max(args.gpus)) as (root, seen):
        prompts = write_prompts(root / "in.jsonl", args.prompts)
        want: list[list[int]] | None = None
        plans = [(gpus, False) for gpus in args.gpus] + ([(max(args.gpus), True)] if args.kill else [])
        for gpus, kill in plans:
            folder = JobFolder(root / f"{gpus}-{kill}")
            config = job_of(args, folder, prompts, gpus)
            run = one_run(config, folder, seen, "large", kill=kill)
            got = folder.rows().sort_by("row_id")["output_token_ids"].to_pylist()
            want = want or got
            digest = hashlib.sha256(json.dumps(got).encode()).hexdigest()[:16]
            run |= {"gpus": gpus, "killed": kill, "rows": len(got), "same_outputs": got == want, "outputs": digest}
            runs.append(run)
            for speed in () if kill else ("tokens_per_s", "tokens_per_s_while_all_work"):
                run[f"{speed}_over_linear"] = run[speed] / (gpus / args.gpus[0] * runs[0][speed])
            print(json.dumps(run), file=sys.stderr, flush=True)
    return {"runs": runs}


def bench_memory(args: argparse.Namespace) -> dict[str, Any]:
    """The same rows with enough memory, and with less and less until it runs out.

    By the backend that takes memory as it goes.
    """
    found: dict[str, Any] = {}
    with ray_of(args.size, 1) as (root, seen):
        prompts = write_prompts(root / "in.jsonl", args.prompts)
        outputs = []
        for spare in (None, *args.spare_gib):
            if spare is not None:
                (root / SPARE).write_text(str(spare))
            folder = JobFolder(root / str(spare))
            config = job_of(args, folder, prompts, 1, backend="torch")
            run = one_run(config, folder, seen, "large" if spare is None else "tight")
            outputs.append(folder.rows().sort_by("row_id")["output_token_ids"].to_pylist())
            found["enough" if spare is None else f"{spare} GiB"] = run
            if (root / RAN_OUT).exists():
                run["too_many_rows_at_a_time"] = [int(line) for line in (root / RAN_OUT).read_text().splitlines()]
                break
        else:
            raise SystemExit("memory never ran out: ask for less by --spare-gib")
        found["rows"] = [len(rows) for rows in outputs]
        found["same_outputs"] = [sum(a == b for a, b in zip(outputs[0], rows, strict=True)) for rows in outputs]
    return found


@contextmanager
def ray_of(size: str, gpus: int) -> Iterator[tuple[Path, Path]]:
    """A local Ray whose workers build a model of that size; a folder to work in and one for the workers' notes."""
    import ray

    with tempfile.TemporaryDirectory() as root:
        seen = Path(root, "seen")
        seen.mkdir()
        os.environ |= {SIZE: size, SEEN: str(seen)}
        ray.init(address="local", num_gpus=gpus, include_dashboard=False, namespace="specfold", log_to_driver=False)
        try:
            yield Path(root), seen
        finally:
            ray.shutdown()


def job_of(args: argparse.Namespace, folder: JobFolder, prompts: str, gpus: int, backend: str = "triton") -> JobConfig:
    return JobConfig(
        model="fast_dllm_v2", prompts=prompts, output=str(folder.output), device="cuda", backend=backend,
        dtype="bfloat16", workers=gpus, gpus_per_worker=1, batch_size=args.batch_size, shard_rows=args.shard_rows,
        **settings_of(args),
    )  # fmt: skip


def one_run(config: JobConfig, folder: JobFolder, seen: Path, engine: str, *, kill: bool = False) -> dict[str, Any]:
    """A job: speed from the first row's start to the last part, and what each GPU and the host had of it."""
    from cluster.driver import run_job

    for note in seen.iterdir():
        note.unlink()
    total = len(Path(config.prompts).read_text().splitlines())
    shards = -(-total // (config.shard_rows or total))
    killed: list[int] = []

    def strike() -> None:
        if kill and not killed and len(folder.parts) >= shards // 3:
            killed.append(json.loads(min(seen.iterdir()).read_text())["pid"])
            os.kill(killed[0], signal.SIGKILL)

    before = time.process_time()
    with watched(strike) as peak:
        code = run_job(config, engine_factory=f"{MODULE}:{engine}")
    driver_s = time.process_time() - before
    if code:
        raise SystemExit(f"the job ended with {code}")
    lines = pq.read_table(folder.output / "shards.parquet").to_pylist()
    begin = min(line["started"].timestamp() for line in lines)
    begins: dict[str, float] = {}
    ends: dict[str, float] = {}
    for line in lines:
        start, worker = line["started"].timestamp(), line["worker"]
        begins[worker] = min(begins.get(worker, start), start)
        ends[worker] = max(ends.get(worker, start), start + line["seconds"])
    seconds = max(ends.values()) - begin
    tokens = sum(line["output_tokens"] for line in lines)
    per_worker = {w: sum(x["output_tokens"] for x in lines if x["worker"] == w) for w in sorted(ends)}
    speeds = {w: tokens / (ends[w] - begins[w]) for w, tokens in per_worker.items()}
    return {
        "seconds": seconds,
        "output_tokens": tokens,
        "tokens_per_s": tokens / seconds,
        "tokens_by_worker": per_worker,
        "tokens_per_s_by_worker": speeds,
        "tokens_per_s_while_all_work": sum(speeds.values()),
        "start_skew_s": max(begins.values()) - begin,
        "idle_tail_share": 1 - sum(end - begin for end in ends.values()) / (len(ends) * seconds),
        "tail_s": max(ends.values()) - min(ends.values()),
        "distinct_gpus": sorted({json.loads(note.read_text())["gpu"] for note in seen.iterdir()}),
        "workers_started": len(list(seen.iterdir())),
        "driver_cpu_s": driver_s,
        "driver_cpu_share": driver_s / seconds,
        "host_memory_gib": peak[0] / 2**30,
        "batch_size": config.batch_size,
    }


@contextmanager
def watched(each: Callable[[], None]) -> Iterator[list[float]]:
    """Peak of the memory of this process and all below it, in bytes (shared pages counted once a process)."""
    peak, stop = [0.0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.25):
            each()
            pages = 0
            for pid in (os.getpid(), *descendants(os.getpid())):
                with suppress(OSError):  # it has ended
                    pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            peak[0] = max(peak[0], pages * os.sysconf("SC_PAGE_SIZE"))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()


def plot(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second against GPUs, beside a line through the fewest: for each size the calls with the most prompts."""
    from matplotlib.figure import Figure

    calls = [json.loads(line) for path in args.results for line in path.read_text().splitlines() if line[:1] == "{"]
    calls = [c for call in calls for c in call.get("calls", [call])]
    sizes = list(dict.fromkeys(call["size"] for call in calls if "runs" in call))
    figure = Figure(figsize=(4 * len(sizes), 3.2), layout="constrained")
    for size, panel in zip(sizes, figure.subplots(1, len(sizes), squeeze=False)[0], strict=True):
        calls_of_size = [call for call in calls if call["size"] == size and "runs" in call]
        longest = max(call["prompts"] for call in calls_of_size)
        runs = sorted(
            (r for c in calls_of_size if c["prompts"] == longest for r in c["runs"] if not r["killed"]),
            key=lambda r: r["gpus"],
        )
        gpus = [run["gpus"] for run in runs]
        for speed, label, marker in (
            ("tokens_per_s", "first row's start to last part", "o"),
            ("tokens_per_s_while_all_work", "while all work", "s"),
        ):
            panel.plot(gpus, [run[speed] for run in runs], marker=marker, label=label)
        panel.plot(gpus, [runs[0]["tokens_per_s"] * n / gpus[0] for n in gpus], "--", color="grey", label="linear")
        panel.set(title=size, xlabel="GPUs", ylabel="tokens/s", xticks=gpus, ylim=(0, None))
        panel.legend(fontsize=8)
    figure.savefig(args.image, dpi=120)
    return {"sizes": sizes}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("scale", "alone", "memory", "plot"))
    parser.add_argument("--size", default="1.5b", help="of jobs/bench.py decode")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--prompts", type=int, default=3000)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--shard-rows", type=int, default=32)
    parser.add_argument("--mode", default="specfold")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--spare-gib", type=float, nargs="+", default=[0.8, 0.4, 0.2, 0.1], help="of memory, in turn")
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--results", type=Path, nargs="+", help="of plot: what other calls printed")
    parser.add_argument("--image", type=Path, help="of plot")
    args = parser.parse_args(argv)
    calls = {"scale": bench_scale, "alone": bench_alone, "memory": bench_memory, "plot": plot}
    found = calls[args.command](args)
    print(json.dumps({"command": args.command, "size": args.size, "prompts": args.prompts} | settings_of(args) | found))


if __name__ == "__main__":
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    main(sys.argv[1:])
