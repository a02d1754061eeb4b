"""Draft graphs: which future states of a block are guessed (Spiffy, arXiv:2509.18085).

A candidate (i, j) is the j-th best token at the masked position that the policy would take i-th, both from 0. A
formula is a set of candidates; the draft's state is the main state plus those tokens. A node's parents are the
formulas it can be reached from by one denoising step; the main state is the parent of nodes without one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specfold.config import AUTO, MAX_DRAFTS, ConfigError, DecodeConfig

FORMAT = "specfold-draft-graph/1"
MAX_RANK = 64

Formula = frozenset[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class DraftGraph:
    """Nodes in an order in which parents come before children.

    ``parents[n]`` lists nodes by index, empty where only the main state leads to node n. ``order`` lists the nodes from
    the most to the least worth having, parents first; empty: as they stand. ``origin`` tells where the graph came from
    (model, data, settings); it does not change decoding.
    """

    formulas: tuple[Formula, ...]
    parents: tuple[tuple[int, ...], ...]
    origin: str | dict[str, Any] = "default"
    order: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check(self.formulas, self.parents)
        if self.order and sorted(self.order) != list(range(len(self.formulas))):
            raise ConfigError("The draft graph's order does not name every node once.")

    def __len__(self) -> int:
        return len(self.formulas)

    @property
    def num_positions(self) -> int:
        """Position ranks that the formulas use."""
        return 1 + max((i for formula in self.formulas for i, _ in formula), default=-1)

    @property
    def num_tokens(self) -> int:
        """Token ranks that the formulas use."""
        return 1 + max((j for formula in self.formulas for _, j in formula), default=-1)

    @property
    def places(self) -> list[int]:
        """Place of each node in the order of worth."""
        order = self.order or range(len(self))
        return sorted(range(len(self)), key=list(order).__getitem__)

    def fold_parent(self, node: int) -> int:
        """The parent to fold on: the one that differs in the fewest tokens; -1 is the main state."""
        return max(self.parents[node], key=lambda p: (len(self.formulas[p]), -p), default=-1)

    def depth(self, node: int) -> int:
        """Denoising steps from the main state along fold parents, less one."""
        parent = self.fold_parent(node)
        return 0 if parent < 0 else 1 + self.depth(parent)

    def prefix(self, num_nodes: int) -> DraftGraph:
        """The graph of the nodes most worth having."""
        if num_nodes >= len(self):
            return self
        kept = sorted((self.order or range(len(self)))[:num_nodes])
        place = {n: i for i, n in enumerate(kept)}
        parents = tuple(tuple(place[p] for p in self.parents[n] if p in place) for n in kept)
        order = tuple(place[n] for n in self.order[:num_nodes])
        return DraftGraph(tuple(self.formulas[n] for n in kept), parents, self.origin, order)

    def to_json(self) -> dict[str, Any]:
        nodes = [
            {"formula": sorted(map(list, formula)), "parents": list(parents)}
            for formula, parents in zip(self.formulas, self.parents, strict=True)
        ]
        return {"format": FORMAT, "origin": self.origin, "order": list(self.order), "nodes": nodes}

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n")


def build_graph(formulas: Iterable[Iterable[tuple[int, int]]], origin: str | dict[str, Any]) -> DraftGraph:
    """Sorts formulas by size and links each to every largest proper subset among them (all its parents).

    Exactly one token a step makes every parent one token smaller; formulas of several tokens a step keep the subsets
    that no other subset lies between. The graph's ``order`` is that in which the formulas were given.
    """
    given = list(dict.fromkeys(frozenset((i, j) for i, j in f) for f in formulas))
    ordered = sorted(given, key=lambda f: (len(f), sorted(f)))
    parents = []
    for n, formula in enumerate(ordered):
        subsets = [p for p in range(n) if ordered[p] < formula]
        parents.append(tuple(p for p in subsets if not any(ordered[p] < ordered[q] for q in subsets)))
    return DraftGraph(tuple(ordered), tuple(parents), origin, tuple(ordered.index(f) for f in given))


def default_graph(num_drafts: int) -> DraftGraph:
    """A chain of the most likely continuations and, from six drafts on, the other orders in which it may come true.

    The order is that of the gain counted on the bundled models (docs/log.md).
    """
    return build_graph(DEFAULT_ORDER[:num_drafts], "default")


def load_graph(source: str | Path, num_drafts: int | None = None) -> DraftGraph:
    """Reads a graph from a file, or from the JSON text itself (a worker may not see the driver's files).

    Raises ConfigError with one sentence for what is not a sound graph or has fewer nodes than ``num_drafts``.
    """
    text = str(source)
    is_json = "\n" in text or text.lstrip().startswith(("{", "["))
    name = "The draft graph" if is_json else f"The draft graph {source}"
    try:
        value = json.loads(text if is_json else Path(source).read_text())
    except (OSError, ValueError, RecursionError) as e:
        raise ConfigError(f"{name} cannot be read: {str(e).splitlines()[0]}.") from e
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise ConfigError(f"{name} is not of format {FORMAT!r}.")
    try:
        graph = _parse(value, "" if is_json else str(source))
    except ConfigError as e:
        raise ConfigError(f"{name} is not sound: {e}") from e
    if num_drafts is not None and len(graph) < num_drafts:
        raise ConfigError(f"{name} has {len(graph)} nodes, fewer than the {num_drafts} drafts asked for.")
    return graph


def _parse(value: dict[str, Any], source: str) -> DraftGraph:
    """The graph of a file's content. Raises ConfigError."""
    nodes = value.get("nodes")
    if not isinstance(nodes, list):
        raise ConfigError("It has no list of nodes.")
    formulas, parents = [], []
    for n, node in enumerate(nodes):
        candidates = node.get("formula") if isinstance(node, dict) else None
        if not isinstance(candidates, list) or not all(_whole_numbers(pair) and len(pair) == 2 for pair in candidates):
            raise ConfigError(f"Node {n} has no formula, a list of pairs of position rank and token rank.")
        if not _whole_numbers(node.get("parents", [])):
            raise ConfigError(f"The parents of node {n} are not a list of whole numbers.")
        formulas.append(frozenset((i, j) for i, j in candidates))
        parents.append(tuple(node.get("parents", [])))
    if not _whole_numbers(value.get("order", [])):
        raise ConfigError("Its order is not a list of whole numbers.")
    origin = value.get("origin", source)
    origin = origin if isinstance(origin, dict) else str(origin)
    return DraftGraph(tuple(formulas), tuple(parents), origin, tuple(value.get("order", [])))


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int for number in value)


def graph_for(config: DecodeConfig) -> DraftGraph:
    """The graph a run uses: the best nodes of the given one, or the default one."""
    if not config.draft_graph:
        return default_graph(config.num_drafts)
    # What is still to be chosen takes a smaller graph, too.
    least = None if config.drafts == AUTO else config.num_drafts
    return load_graph(config.draft_graph, least).prefix(config.num_drafts)


def _check(formulas: Sequence[Formula], parents: Sequence[Sequence[int]]) -> None:
    def require(ok: bool, message: str) -> None:
        if not ok:
            raise ConfigError(message)

    require(len(formulas) <= MAX_DRAFTS, f"A draft graph has at most {MAX_DRAFTS} nodes, not {len(formulas)}.")
    require(len(set(formulas)) == len(formulas), "Two nodes of the draft graph have the same formula.")
    for n, formula in enumerate(formulas):
        require(bool(formula), f"Node {n} of the draft graph has an empty formula.")
        positions = [i for i, _ in formula]
        require(len(set(positions)) == len(positions), f"Node {n} of the draft graph names a position twice.")
        inside = all(0 <= rank < MAX_RANK for candidate in formula for rank in candidate)
        require(inside, f"Node {n} of the draft graph has a rank outside 0..{MAX_RANK - 1}.")
        for p in parents[n]:
            require(0 <= p < n, f"Node {n} of the draft graph has parent {p}, which does not come before it.")
            require(formulas[p] < formula, f"Node {n} of the draft graph does not contain its parent {p}.")


def _chain(length: int) -> list[tuple[int, int]]:
    return [(i, 0) for i in range(length)]


DEFAULT_ORDER: list[list[tuple[int, int]]] = [
    *map(_chain, range(1, 6)),
    [(1, 0)],
    _chain(6),
    [(0, 0), (2, 0)],
    _chain(7),
    [(0, 0), (1, 0), (3, 0)],
    _chain(8),
    [(0, 0), (1, 0), (2, 0), (4, 0)],
    *map(_chain, range(9, MAX_DRAFTS - 3)),
]
