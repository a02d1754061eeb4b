"""What plain decoding of prompts does, step by step, told as draft formulas that came true.

At every step the drafts of a main state are ranked by the distribution before it; each state that follows is then the
main state plus a set of ranked candidates: a formula. Speculation never changes which states follow, so these traces
tell exactly how many forwards any draft graph needs.

S slots, T block positions, I position ranks, J token ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, replace

from specfold.branches import rank_candidates
from specfold.config import ConfigError, DecodeConfig
from specfold.drafts import Formula
from specfold.engine import Engine
from specfold.request import ERROR, Request
from specfold.slots import SlotState
from specfold.stats import DecodeStats
from specfold.step import StepContext, StepResult
from specfold.watch import Watch

NUM_RANKS, NUM_TOKENS = 16, 8
"""Candidates that are told apart: beyond them nothing is worth a draft."""

Chain = tuple[Formula, ...]


@dataclass(frozen=True, slots=True)
class BlockTrace:
    """One block of one row. The states are numbered from the opened block on."""

    chains: tuple[Chain, ...]
    """For each state that gets a forward, the formulas of the states after it, one more step each, as far as they can
    be told; empty in a block's first state, which has no distribution to draft from."""
    finished: bool
    """The last state has no mask, and its forward commits the block; otherwise the row ends with the state after it."""

    def forwards(self, graph: Set[Formula]) -> int:
        """Forwards that the block takes with the drafts of a graph; with none, what plain decoding takes."""
        at, count, last = 0, 0, len(self.chains) - 1
        while at <= last:
            count += 1
            at += accepted(self.chains[at], graph)
            if self.finished and at == last:
                break
            at += 1
        return count


def accepted(chain: Chain, graph: Set[Formula]) -> int:
    """Drafts that come true in a row."""
    for n, formula in enumerate(chain):
        if formula not in graph:
            return n
    return len(chain)


@dataclass(frozen=True, slots=True)
class Trajectories:
    """The blocks of all prompts, and the counters of plain decoding."""

    blocks: tuple[BlockTrace, ...]
    stats: DecodeStats

    def forwards(self, graph: Set[Formula] = frozenset()) -> int:
        """Forwards of all rows with the drafts of a graph."""
        return sum(block.forwards(graph) for block in self.blocks)


def record_trajectories(
    engine: Engine, requests: Iterable[Request], config: DecodeConfig, batch_size: int = 8, lookahead: int = 16
) -> Trajectories:
    """Decodes prompts plainly under the settings of ``config`` and records ``lookahead`` steps ahead of every state.

    Any backend's engine serves; the torch backend decodes. Raises ConfigError where no prompt could be decoded, and for
    modes that have no drafts.
    """
    if config.mode in ("ar", "linear_spec"):
        raise ConfigError(f"mode {config.mode} has no drafts that a graph could order.")
    plain = replace(config, mode="vanilla", drafts=0, draft_graph=None, draft_budget=None)
    watched = Engine(engine.model, engine.info, engine.tokenizer, "torch")
    recorder = _Recorder(lookahead)
    stats, decoded, problem = DecodeStats(), 0, "there is none"
    for completion in watched.stream(iter(requests), plain, batch_size, recorder):
        if completion.finish_reason == ERROR:
            problem = str(completion.error)
        else:
            decoded += 1
            stats.add(completion.stats)
    if not decoded:
        raise ConfigError(f"no prompt could be decoded to record from: {problem.rstrip('.')}.")
    return Trajectories(tuple(recorder.blocks), stats)


@dataclass(slots=True)
class _State:
    """A state that got a forward: its tokens, and the rank of every candidate (position, token) that has one."""

    tokens: list[int]
    ranks: dict[tuple[int, int], tuple[int, int]]


class _Recorder(Watch):
    """Collects the states of every slot's block and closes the book when the block or the row ends."""

    num_ranks, num_tokens = NUM_RANKS, NUM_TOKENS

    def __init__(self, lookahead: int) -> None:
        self.blocks: list[BlockTrace] = []
        self._lookahead = lookahead
        self._open: dict[int, list[_State]] = {}
        self._mask_id = -1

    def before_step(self, slots: SlotState, context: StepContext) -> None:
        self._mask_id = context.mask_id
        masked_ST = slots.state_ST == context.mask_id
        position, token, _, usable = rank_candidates(slots, masked_ST, self.num_ranks, context.rules)
        ranked = [x.tolist() for x in (position, token, usable)]
        state, drafting = slots.state_ST.tolist(), (slots.has_guess_S & masked_ST.any(-1)).tolist()
        for slot, active in enumerate(slots.active_S.tolist()):
            if active:
                ranks = _ranks(*(x[slot] for x in ranked)) if drafting[slot] else {}
                self._open.setdefault(slot, []).append(_State(state[slot], ranks))

    def after_step(self, slots: SlotState, result: StepResult) -> None:
        ended, committed = result.ending.done_S.tolist(), result.committed_S.tolist()
        invalid, state = result.invalid_S.tolist(), slots.state_ST.tolist()
        for slot in list(self._open):
            if invalid[slot]:
                del self._open[slot]
            elif committed[slot]:
                self._close(slot, None)
            elif ended[slot]:
                self._close(slot, state[slot])

    def _close(self, slot: int, end: list[int] | None) -> None:
        """``end``: the state that ended the row, which needs no forward."""
        states = self._open.pop(slot)
        chains = [
            _chain(state, [later.tokens for later in states[n + 1 : n + 1 + self._lookahead]], self._mask_id)
            for n, state in enumerate(states)
        ]
        self.blocks.append(BlockTrace(tuple(chains), finished=end is None))


def _ranks(
    positions_I: list[int], tokens_IJ: list[list[int]], usable_IJ: list[list[bool]]
) -> dict[tuple[int, int], tuple[int, int]]:
    return {
        (position, token): (i, j)
        for i, position in enumerate(positions_I)
        for j, (token, usable) in enumerate(zip(tokens_IJ[i], usable_IJ[i], strict=True))
        if usable
    }


def _chain(state: _State, later: list[list[int]], mask_id: int) -> Chain:
    """The formulas of the states that follow, up to the first that cannot be told."""
    formulas = []
    for tokens in later:
        new = [(n, token) for n, (token, old) in enumerate(zip(tokens, state.tokens, strict=True)) if old == mask_id]
        found = [state.ranks.get(candidate) for candidate in new if candidate[1] != mask_id]
        if None in found:
            break
        formulas.append(frozenset(rank for rank in found if rank is not None))
    return tuple(formulas)
