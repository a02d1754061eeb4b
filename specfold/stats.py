"""Counters of decoding: kept per row, added up per shard, worker and job."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal


@dataclass(slots=True)
class DecodeStats:
    """Sums over one or many rows. Lists are indexed by draft depth (0 = one step ahead) unless said otherwise.

    Only committed output tokens count as output: no prompt, no mask, no padding, nothing after the stop token.
    """

    prompt_tokens: int = 0
    output_tokens: int = 0
    prefill_tokens: int = 0
    denoise_forwards: int = 0
    commit_forwards: int = 0
    drafts_proposed: int = 0
    drafts_accepted: int = 0
    proposed_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    run_lengths: list[int] = field(default_factory=list)
    """``run_lengths[k]``: forwards in which exactly k drafts were accepted in a row."""
    recomputed_qkv_rows: int = 0
    """Positions whose QKV was computed, summed over layers and forwards."""
    recomputed_ffn_rows: int = 0
    draft_rows: list[int] = field(default_factory=list)
    """Positions of foldable drafts, by depth, counted once a forward (not once a layer)."""
    folded_qkv: list[list[int]] = field(default_factory=list)
    """``folded_qkv[layer][depth]``: positions that inherited their QKV."""
    folded_ffn: list[list[int]] = field(default_factory=list)
    main_rows: int = 0
    """Positions of main branches that denoise, counted once a forward; 0 where steps take nothing from one another."""
    main_folded_qkv: list[int] = field(default_factory=list)
    """``main_folded_qkv[layer]``: of those, the ones that inherited their QKV from the step before."""
    main_folded_ffn: list[int] = field(default_factory=list)
    seconds: float = 0.0
    """Time from a slot of its own to the last token, summed over rows; not wall time when rows decode together."""

    @property
    def num_forwards(self) -> int:
        """Forwards the rows took part in, prefill excluded (NFE)."""
        return self.denoise_forwards + self.commit_forwards

    @property
    def tokens_per_forward(self) -> float | None:
        return self.output_tokens / self.num_forwards if self.num_forwards else None

    @property
    def foldable(self) -> int:
        """What drafts could have inherited: a QKV and a feed-forward output for each position and layer."""
        return 2 * sum(self.draft_rows) * len(self.folded_qkv)

    @property
    def folded(self) -> int:
        """What they did inherit."""
        return sum(map(sum, self.folded_qkv)) + sum(map(sum, self.folded_ffn))

    @property
    def fold_rate(self) -> float | None:
        """Mean of the folded QKV and FFN shares over foldable draft positions and layers; None without drafts."""
        return self.folded / self.foldable if self.foldable else None

    @property
    def fold_rate_by_layer(self) -> list[float]:
        """The same share per layer."""
        total = sum(self.draft_rows)
        if not total:
            return []
        return [(sum(qkv) + sum(ffn)) / (2 * total) for qkv, ffn in zip(self.folded_qkv, self.folded_ffn, strict=True)]

    @property
    def time_fold_rate(self) -> float | None:
        """Mean of the folded QKV and FFN shares over main positions and layers; None where steps inherit nothing."""
        total = self.main_rows * len(self.main_folded_qkv)
        return (sum(self.main_folded_qkv) + sum(self.main_folded_ffn)) / (2 * total) if total else None

    @property
    def recomputed_rows_per_token(self) -> float | None:
        """QKV rows computed for one output token, summed over layers: what the tokens cost at large batches."""
        return self.recomputed_qkv_rows / self.output_tokens if self.output_tokens else None

    def recomputed_per_forward(self, part: Literal["qkv", "ffn"]) -> list[list[float]]:
        """Rows of denoising branches that a forward with a denoising main branch computes in the mean, ``[layer][0]``
        for the main branch and ``[layer][d]`` for all drafts of depth d. Empty where steps inherit nothing from one
        another."""
        main = self.main_folded_qkv if part == "qkv" else self.main_folded_ffn
        if not main:
            return []
        drafts = (self.folded_qkv if part == "qkv" else self.folded_ffn) or [[]] * len(main)
        forwards = max(self.denoise_forwards, 1)
        return [
            [(self.main_rows - folded) / forwards]
            + [(rows - inherited) / forwards for rows, inherited in zip(self.draft_rows, layer, strict=True)]
            for folded, layer in zip(main, drafts, strict=True)
        ]

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Accepted over proposed drafts at each depth."""
        return [a / p if p else 0.0 for a, p in zip(self.accepted_by_depth, self.proposed_by_depth, strict=True)]

    def add(self, other: DecodeStats) -> None:
        """Add another row's or shard's counters to these."""
        for f in fields(self):
            setattr(self, f.name, _sum(getattr(self, f.name), getattr(other, f.name)))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DecodeStats:
        """Inverse of ``to_dict``; a key that is not a counter is ignored, so newer files stay readable."""
        known = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in values.items() if k in known})


def _sum(a: Any, b: Any) -> Any:
    """Sum of two numbers, or element by element of two nested lists, the shorter one padded with zeros."""
    if not isinstance(a, list):
        return a + b
    longer, shorter = (a, b) if len(a) >= len(b) else (b, a)
    return [_sum(x, shorter[i]) if i < len(shorter) else x for i, x in enumerate(longer)]
