"""What steers a decoding step on the device: rules, the draft graph, slots, and what a step reports.

S slots, B branches (0 the main one), T block positions, I position ranks, J kept tokens, K draft depths, L layers.
Everything is made once; kernels update it in place, so that a step can be captured as one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

NEVER = 1 << 40
"""A position that no row reaches."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How blocks of one run behave; compiled into the kernels."""

    block_size: int
    group_size: int
    """Positions that the policy may unmask together: the leftmost group with masks."""
    threshold: float | None
    """Confidence from which further positions are unmasked beside the best one; None for one token a step."""
    strict: bool
    """A position passes the threshold only above it, not at it."""
    logit_shift: int
    """The prediction for position n stands at position n - logit_shift."""
    seeded: bool
    """Position 0 of a block is the token that follows the block before it."""
    seed_sampled: bool
    """That token is drawn at the row's temperature; otherwise it is the argmax."""
    verify_draft: bool
    """A finished block counts only as far as the forward over it predicts its tokens."""
    mask_id: int
    end_think_id: int | None
    sampled: bool
    """Some rows may have a temperature above 0."""


@dataclass(frozen=True, slots=True)
class Graph:
    """A draft graph. Branch 0 is the main state, branch n + 1 is node n."""

    token_rank_BI: torch.Tensor
    """int32: token rank that a branch puts at each position rank, -1 where it leaves the mask."""
    parent_B: torch.Tensor
    """int32: branch to fold on, below the branch's own number; 0 for the main one."""
    ancestors_B: torch.Tensor
    """int64 bit set of a branch's ancestors along ``parent_B``, itself included."""
    depth_B: torch.Tensor
    """int32: steps from the main state; 0 for the main state itself."""
    num_depths: int
    size_B: torch.Tensor
    """int32: tokens that a branch puts."""
    place_B: torch.Tensor
    """int32: place of a draft in the graph's order of worth."""
    budget: int
    """Most drafts of a slot that a step verifies."""

    @classmethod
    def build(
        cls,
        token_ranks: Sequence[Sequence[int]],
        parents: Sequence[int],
        device: torch.device | str,
        budget: int | None = None,
        places: Sequence[int] | None = None,
    ) -> Graph:
        """From the token ranks [B][I] and the parent of every branch. ``budget`` None: all drafts; ``places`` None: as
        they stand."""
        depths, ancestors = [0], [1]
        for b in range(1, len(parents)):
            depths.append(depths[parents[b]] + 1)
            ancestors.append(ancestors[parents[b]] | 1 << b)
        return cls(
            torch.tensor(token_ranks, dtype=torch.int32, device=device).view(len(parents), -1),
            torch.tensor(parents, dtype=torch.int32, device=device),
            torch.tensor(ancestors, dtype=torch.int64, device=device),
            torch.tensor(depths, dtype=torch.int32, device=device),
            max(depths),
            torch.tensor([sum(j >= 0 for j in ranks) for ranks in token_ranks], dtype=torch.int32, device=device),
            torch.tensor(places or [max(b - 1, 0) for b in range(len(parents))], dtype=torch.int32, device=device),
            len(parents) - 1 if budget is None else budget,
        )

    @property
    def num_branches(self) -> int:
        return self.token_rank_BI.shape[0]

    @property
    def prunes(self) -> bool:
        """There are more drafts than a step may verify."""
        return self.budget < self.num_branches - 1

    @property
    def num_ranks(self) -> int:
        """Position ranks that drafts use; 0 without drafts."""
        return self.token_rank_BI.shape[1]


@dataclass(frozen=True, slots=True)
class Slots:
    """The rows that decode together, one a slot. A row that ends leaves ``active`` at once, on the device."""

    active_S: torch.Tensor
    """bool."""
    pending_S: torch.Tensor
    """bool: the row ended when its first block was opened; the next step reports it. Such a slot is not active."""
    state_ST: torch.Tensor
    """int64: token ids of the block, the mask id where undecided."""
    start_S: torch.Tensor
    """int64: first position of the block, which is also the cached length."""
    first_new_S: torch.Tensor
    """int64: offset in the block of the first generated position (the prompt's ragged end stands before it)."""
    limit_S: torch.Tensor
    """int64: absolute position at which the row ends whatever happens."""
    think_S: torch.Tensor
    """int64: absolute position where the end-of-thinking token is due; NEVER when it is off or has been written."""
    key_S2: torch.Tensor
    """int64, two words below 2**32."""
    sample_S: torch.Tensor
    """int64."""
    temperature_S: torch.Tensor
    """float32; 0 is greedy."""
    has_guess_S: torch.Tensor
    """bool: the block has a last accepted distribution to draft from."""
    guess_token_STJ: torch.Tensor
    """int64: the J best tokens of each position by that distribution."""
    guess_logprob_STJ: torch.Tensor
    """float32, descending in J; -inf where not computed."""

    @classmethod
    def empty(cls, num_slots: int, block: int, num_top: int, device: torch.device | str) -> Slots:
        """``num_slots`` free slots."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros((num_slots, *shape), dtype=dtype, device=device)

        return cls(
            active_S=zeros(dtype=torch.bool),
            pending_S=zeros(dtype=torch.bool),
            state_ST=zeros(block),
            start_S=zeros(),
            first_new_S=zeros(),
            limit_S=zeros(),
            think_S=zeros(),
            key_S2=zeros(2),
            sample_S=zeros(),
            temperature_S=zeros(dtype=torch.float32),
            has_guess_S=zeros(dtype=torch.bool),
            guess_token_STJ=zeros(block, num_top),
            guess_logprob_STJ=zeros(block, num_top, dtype=torch.float32),
        )


FLAGS = (
    "active",
    "done",
    "stopped",
    "invalid",
    "committed",
    "length",
    "end",
    "block_first_new",
    "first_new",
    "start",
)
"""Columns of ``Result.packed_SN`` before the two blocks; the kernels write them in this order."""


@dataclass(frozen=True, slots=True)
class Result:
    """What the host needs of a step, in one allocation so that one copy fetches it.

    How to read a slot, one step late: ``invalid``: the row failed. Otherwise ``committed``: tokens
    ``block[block_first_new:length]`` are output. Then ``done``: tokens ``state[first_new:end]`` are the last ones, and
    a stop token ended the row where ``stopped``, else its limit. ``active`` tells whether the slot took part in the
    step; a row that ended when it was opened is reported as done without it. ``first_new`` and ``start`` belong to
    ``state``, the block after the step.
    """

    packed_SN: torch.Tensor
    """int64 [S, len(FLAGS) + 2 * T]: the flags, the finished block (undefined unless committed), the state."""

    @classmethod
    def empty(cls, num_slots: int, block: int, device: torch.device | str, pin: bool = False) -> Result:
        """Room for a step's report; ``pin`` for the host's side of an asynchronous copy."""
        shape = (num_slots, len(FLAGS) + 2 * block)
        return cls(torch.zeros(shape, dtype=torch.int64, device=device, pin_memory=pin))

    def flag(self, name: str) -> torch.Tensor:
        """One column, [S]; a view."""
        return self.packed_SN[:, FLAGS.index(name)]

    @property
    def block_ST(self) -> torch.Tensor:
        block = (self.packed_SN.shape[1] - len(FLAGS)) // 2
        return self.packed_SN[:, len(FLAGS) : len(FLAGS) + block]

    @property
    def state_ST(self) -> torch.Tensor:
        block = (self.packed_SN.shape[1] - len(FLAGS)) // 2
        return self.packed_SN[:, len(FLAGS) + block :]


@dataclass(frozen=True, slots=True)
class Commit:
    """Which branches' keys and values enter the cache after a step."""

    branch_S: torch.Tensor
    """int32: the committed branch, -1 for none."""
    length_S: torch.Tensor
    """int64: positions of the block that are committed."""
    start_S: torch.Tensor
    """int64: where they start; ``Slots.start_S`` has moved on by then."""

    @classmethod
    def empty(cls, num_slots: int, device: torch.device | str) -> Commit:
        length, start = torch.zeros((2, num_slots), dtype=torch.int64, device=device)
        return cls(torch.full((num_slots,), -1, dtype=torch.int32, device=device), length, start)


@dataclass(frozen=True, slots=True)
class Carry:
    """What a step hands to the next one of the same block: stored rows, where the main branch folds in time."""

    branch_S: torch.Tensor
    """int32: the accepted branch whose results become the stored rows; -1 for none."""
    steps_S: torch.Tensor
    """int64: steps of the slot's block so far."""
    valid_S: torch.Tensor
    """int32: 1 where the next step may inherit from the stored rows."""
    compute_ST: torch.Tensor
    """int64: 1 at the positions that the next step computes whatever has changed: with the sub-block cache the active
    sub-block, otherwise none."""
    refresh_every: int
    """So many steps of a block are followed by one that inherits nothing; 0: none is."""
    sub_blocks: bool
    """The sub-block cache: a step whose active sub-block begins with a mask inherits nothing either."""

    @classmethod
    def empty(cls, steps_S: torch.Tensor, block: int, refresh_every: int = 0, sub_blocks: bool = False) -> Carry:
        """Nothing stored; ``steps_S`` is the slots' own."""
        num_slots, device = len(steps_S), steps_S.device
        branch, valid = torch.zeros((2, num_slots), dtype=torch.int32, device=device)
        compute = torch.zeros((num_slots, block), dtype=torch.int64, device=device)
        return cls(branch, steps_S, valid, compute, refresh_every, sub_blocks)

    def clear(self, slot: int) -> None:
        """Forgets what is stored: the slot opens another row's block."""
        self.steps_S[slot].zero_()
        self.valid_S[slot].zero_()


@dataclass(frozen=True, slots=True)
class Counters:
    """Sums per slot, int64, added up step by step; the host clears a slot's when a row enters it."""

    denoise_S: torch.Tensor
    commit_S: torch.Tensor
    proposed_SK: torch.Tensor
    accepted_SK: torch.Tensor
    draft_rows_SK: torch.Tensor
    """Positions of the drafts that can be folded."""
    run_lengths_SB: torch.Tensor
    """Denoising steps by the number of drafts that came true; all zero without drafts."""
    qkv_rows_S: torch.Tensor
    ffn_rows_S: torch.Tensor
    """Recomputed rows of all layers."""
    folded_qkv_SLK: torch.Tensor
    folded_ffn_SLK: torch.Tensor
    main_qkv_SL: torch.Tensor
    """Positions of denoising main branches that were folded in time."""
    main_ffn_SL: torch.Tensor

    @classmethod
    def empty(
        cls, num_slots: int, num_branches: int, num_layers: int, num_depths: int, device: torch.device | str
    ) -> Counters:
        shapes = {"K": (num_depths,), "B": (num_branches,), "LK": (num_layers, num_depths), "L": (num_layers,), "": ()}
        suffixes = {f.name: f.name.rsplit("_S", 1)[1] for f in fields(cls)}
        return cls(
            **{
                name: torch.zeros((num_slots, *shapes[suffix]), dtype=torch.int64, device=device)
                for name, suffix in suffixes.items()
            }
        )

    def clear(self, slot: int) -> None:
        """Starts a slot's counters from zero."""
        for f in fields(self):
            getattr(self, f.name)[slot].zero_()
