"""Make a draft graph for a model and its kind of prompts.

python jobs/calibrate.py --save graph.json
python jobs/calibrate.py --model ./model --prompts 'prompts/*.jsonl' --save graph.json --compare 40
python jobs/generate.py --model ./model --prompts 'prompts/*.jsonl' --draft-graph graph.json --drafts 8
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

HERE = Path(__file__).resolve().parent
if sys.path and Path(sys.path[0]).resolve() == HERE:
    sys.path[0] = str(HERE.parent)  # a file in jobs/ must not hide a library's module of its name

if __name__ == "__main__":
    from jobs.stopping import stop_at_once

    stop_at_once()  # the imports below take seconds

from cyclopts import Group, Parameter  # noqa: E402

from cluster.errors import UserError  # noqa: E402
from cluster.flags import File, Int, Text  # noqa: E402
from cluster.input.rows import PreparedRow  # noqa: E402
from cluster.input.sample import sample_rows  # noqa: E402
from cluster.input.source import open_input  # noqa: E402
from cluster.worker.calibration import graph_origin, record_rows  # noqa: E402
from jobs.tools import ToolConfig, load_engine, other_prompts, run_tool, settle, write_whole  # noqa: E402
from specfold.benchmark.report import print_table  # noqa: E402
from specfold.calibration import Selection, calibrated_graph, compare_graphs  # noqa: E402
from specfold.config import MAX_DRAFTS  # noqa: E402

SIZES = (2, 4, 6, 8, 12, 16)
_GROUP = Parameter(group=Group("Calibration", sort_key=0))


def calibrate(
    *,
    save: Annotated[File, _GROUP],
    rows: Annotated[Int, _GROUP] = 50,
    nodes: Annotated[Int, _GROUP] = 16,
    select: Annotated[Selection, _GROUP] = "forwards",
    compare: Annotated[Int, _GROUP] = 0,
    compare_prompts: Annotated[Text | None, _GROUP] = None,
    config: Annotated[ToolConfig | None, Parameter(name="*")] = None,
) -> int:
    """Decode prompts step by step, see which draft formulas come true, and save the graph that pays most.

    Parameters
    ----------
    save
        File for the draft graph.
    rows
        Prompts to learn from: the first ones of the input.
    nodes
        Drafts in the graph; a job takes the first --drafts of them.
    select
        How nodes are chosen: forwards adds the one that saves most; degree-1 is Spiffy's rule, the count of a node and
        of its parents; degree-0 is the count alone, total that of all ancestors.
    compare
        Judge all rules, the default graph and the best one possible on so many further prompts, and print a table.
    compare_prompts
        Take the prompts for that from this input instead, to see how the graph carries over.
    """
    for name, value, least in (("rows", rows, 1), ("nodes", nodes, 1), ("compare", compare, 0)):
        if value < least:
            raise UserError(f"--{name} must be at least {least}, not {value}.")
    if nodes > MAX_DRAFTS:
        raise UserError(f"--nodes must be at most {MAX_DRAFTS}, not {nodes}.")
    if compare_prompts is not None and not compare:
        raise UserError("--compare-prompts needs --compare, the number of prompts to judge on.")
    if not save.resolve().parent.is_dir() or save.is_dir():
        raise UserError(f"--save {save} cannot be written: it must name a file in a folder that exists.")
    settled = settle(config or ToolConfig())
    engine, model, folder = load_engine(settled, "torch")
    learnt_from = sample_rows(settled, open_input(settled), folder, rows)
    judged_on = _held_out(settled, folder, rows, compare, compare_prompts) if compare else []

    started = time.monotonic()
    found = record_rows(engine, settled, learnt_from)
    origin = graph_origin(settled, model, len(learnt_from), select, found)
    graph = calibrated_graph(found, nodes, select, origin)
    write_whole(save, json.dumps(graph.to_json(), indent=1) + "\n")
    seconds = time.monotonic() - started
    print(f"{save}: {nodes} nodes from {len(learnt_from)} prompts and {found.forwards():,} steps, {seconds:.0f} s.")
    report: dict[str, Any] = {"graph": str(save), "rows": len(learnt_from), "seconds": round(seconds, 1)}
    if judged_on:
        held_out = record_rows(engine, settled, judged_on)
        plain = held_out.forwards() / max(held_out.stats.output_tokens, 1)
        records = compare_graphs(found, held_out, [size for size in SIZES if size <= nodes])
        report |= {"compared_rows": len(judged_on), "plain_forwards_per_token": round(plain, 4), "records": records}
        print(f"On {len(judged_on)} other prompts, {plain:.3f} forwards a token without drafts:")
        print_table(records)
    print(json.dumps(report))
    return 0


def _held_out(
    config: ToolConfig, folder: str, rows: int, compare: int, compare_prompts: str | None
) -> list[PreparedRow]:
    """Prompts that the graph has not seen."""
    if compare_prompts is None:
        return sample_rows(config, open_input(config), folder, compare, skip=rows)
    other = settle(other_prompts(config, compare_prompts))
    return sample_rows(other, open_input(other), folder, compare)


def main(argv: Sequence[str]) -> int:
    """Run the command; the last line it prints is JSON. A user's mistake is one line on stderr and exit code 2."""
    return run_tool(calibrate, "calibrate", argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
