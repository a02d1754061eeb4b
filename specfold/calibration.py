"""Draft graphs from what came true: counting, selection, and how far a graph is from the best one possible.

Source: Spiffy (arXiv:2509.18085), offline calibration. A formula's count is how often it came true within the recorded
steps ahead; its parents are the formulas it was reached from by one denoising step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

from specfold.drafts import DEFAULT_ORDER, DraftGraph, Formula, build_graph, default_graph
from specfold.trajectory import Trajectories

Selection = Literal["forwards", "degree-0", "degree-1", "total"]
"""How nodes are chosen. ``degree-1`` is Spiffy's: a node is worth its own count and its parents'; ``degree-0`` is the
own count alone, ``total`` that of all ancestors. ``forwards`` (ours) adds the node that saves the most forwards."""
SELECTIONS: tuple[Selection, ...] = ("forwards", "degree-0", "degree-1", "total")
_WIDTH = 40
"""Candidates that ``forwards`` tries for each node: those most often true among the reachable."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What came true, how often, and along which edges. An empty parent is the main state."""

    count: Counter[Formula]
    parents: dict[Formula, set[Formula]]
    children: dict[Formula, set[Formula]]

    @classmethod
    def of(cls, trajectories: Trajectories) -> Counts:
        count: Counter[Formula] = Counter()
        edges: set[tuple[Formula, Formula]] = set()
        for block in trajectories.blocks:
            for chain in block.chains:
                count.update(chain)
                edges.update(zip((frozenset(), *chain), chain, strict=False))
        parents, children = defaultdict(set), defaultdict(set)
        for parent, child in edges:
            parents[child].add(parent)
            children[parent].add(child)
        return cls(count, dict(parents), dict(children))

    def ancestors(self, formula: Formula) -> set[Formula]:
        """All formulas on any way to this one, without the main state."""
        found: set[Formula] = set()
        open_ = [formula]
        while open_:
            new = self.parents[open_.pop()] - found - {frozenset()}
            found |= new
            open_ += new
        return found


def select_formulas(trajectories: Trajectories, num_nodes: int, selection: Selection = "forwards") -> list[Formula]:
    """The formulas of a connected graph, best first, so that any first few of them are a graph as well.

    Each is reached by one observed step from the main state or from a chosen formula. Where too few were observed, the
    default graph fills up.
    """
    counts = Counts.of(trajectories)
    width = _WIDTH if selection == "forwards" else None
    chosen = _grow(counts, num_nodes, _worth(trajectories, counts, selection), width)
    default = [frozenset(formula) for formula in DEFAULT_ORDER]
    chosen += [formula for formula in default if formula not in chosen][: num_nodes - len(chosen)]
    if selection == "forwards" and trajectories.forwards({*default[:num_nodes]}) < trajectories.forwards({*chosen}):
        # One node at a time does not see what only a pair brings.
        return default[:num_nodes]
    return chosen


def calibrated_graph(
    trajectories: Trajectories, num_nodes: int, selection: Selection, origin: dict[str, Any]
) -> DraftGraph:
    """A graph of ``num_nodes`` formulas made for these trajectories."""
    return build_graph(select_formulas(trajectories, num_nodes, selection), origin)


def oracle_formulas(trajectories: Trajectories, num_nodes: int, starts: Iterable[Set[Formula]] = ()) -> set[Formula]:
    """The best graph found for the very prompts that it is judged on: every other one is held against it.

    From the best of all selections and ``starts``, nodes are exchanged as long as that saves forwards.
    """
    counts = Counts.of(trajectories)
    found = [set(select_formulas(trajectories, num_nodes, selection)) for selection in SELECTIONS]
    found += [set(start) for start in starts]
    best = min(found, key=lambda graph: trajectories.forwards(graph))
    while (better := _exchange(trajectories, counts, best)) is not None:
        best = better
    return best


def compare_graphs(
    fit: Trajectories, held_out: Trajectories, sizes: Sequence[int], more: dict[str, DraftGraph] | None = None
) -> list[dict[str, Any]]:
    """Forwards of the held-out prompts with every kind of graph fitted on ``fit``, beside the default and the oracle.

    ``more``: further graphs by name, cut to each size. One record a size and graph: forwards, forwards per output
    token, and the saving as a share of the oracle's.
    """
    plain, tokens = held_out.forwards(), max(held_out.stats.output_tokens, 1)
    records = []
    for size in sizes:
        graphs: dict[str, Set[Formula]] = {"default": frozenset(default_graph(size).formulas)}
        graphs |= {name: frozenset(graph.prefix(size).formulas) for name, graph in (more or {}).items()}
        graphs |= {name: frozenset(select_formulas(fit, size, name)) for name in SELECTIONS}
        graphs["oracle"] = oracle_formulas(held_out, size, list(graphs.values()))
        most = plain - held_out.forwards(graphs["oracle"])
        for name, graph in graphs.items():
            forwards = held_out.forwards(graph)
            records.append(
                {
                    "drafts": size,
                    "graph": name,
                    "forwards": forwards,
                    "forwards_per_token": round(forwards / tokens, 4),
                    "share_of_oracle": round((plain - forwards) / most, 4) if most else None,
                }
            )
    return records


Worth = Callable[[Formula, Set[Formula]], int]
"""What a formula adds to those chosen before it."""


def _grow(counts: Counts, num_nodes: int, worth: Worth, width: int | None) -> list[Formula]:
    """Adds the worthiest of the ``width`` first reachable formulas again and again; ties go to the smaller one."""
    chosen: list[Formula] = []
    while len(chosen) < num_nodes:
        before = frozenset(chosen)
        reachable = _reachable(counts, before)[:width]
        if not reachable:
            break
        worths = {formula: worth(formula, before) for formula in reachable}
        chosen.append(max(reachable, key=worths.__getitem__))  # the first of equals
    return chosen


def _reachable(counts: Counts, chosen: Set[Formula]) -> list[Formula]:
    """Formulas one observed step away, those most often true first; ties by size and rank."""
    near: set[Formula] = set()
    for parent in (frozenset(), *chosen):
        near |= counts.children.get(parent, set())
    return sorted(near - chosen, key=lambda f: (-counts.count[f], len(f), sorted(f)))


def _worth(trajectories: Trajectories, counts: Counts, selection: Selection) -> Worth:
    count = counts.count
    if selection == "forwards":
        blocks = Counter(trajectories.blocks)
        return lambda formula, chosen: -sum(n * block.forwards({*chosen, formula}) for block, n in blocks.items())
    if selection == "degree-0":
        return lambda formula, _: count[formula]
    if selection == "degree-1":
        return lambda formula, _: count[formula] + sum(count[p] for p in counts.parents[formula] if p)
    return lambda formula, _: count[formula] + sum(count[a] for a in counts.ancestors(formula))


def _exchange(trajectories: Trajectories, counts: Counts, graph: set[Formula]) -> set[Formula] | None:
    """The graph with one node exchanged for a better one, or None."""
    now = trajectories.forwards(graph)
    for formula in sorted(graph, key=lambda f: (counts.count[f], sorted(f))):
        rest = graph - {formula}
        reachable = _reachable(counts, rest)[:_WIDTH]
        if not reachable:
            continue
        best = min(({*rest, other} for other in reachable), key=trajectories.forwards)
        if trajectories.forwards(best) < now:
            return best
    return None
