"""The settings of folding: which gates there are and what they let inherit."""

from __future__ import annotations

from dataclasses import dataclass

from specfold.config import DecodeConfig, FfnGate


@dataclass(frozen=True, slots=True)
class Folding:
    """The gates' settings; a ``delta`` below 0 folds no draft, a ``time_delta`` below 0 no main branch."""

    delta: float
    ffn_gate: FfnGate
    time_delta: float = -1.0
    refresh_every: int = 0
    """Every so many steps of a block compute everything; 0: only its first."""
    block_cache: bool = False

    @classmethod
    def of(cls, config: DecodeConfig) -> Folding:
        return cls(config.fold_delta, config.ffn_gate, config.time_delta, config.refresh_every, config.use_block_cache)

    @property
    def carries(self) -> bool:
        """Steps need a stored branch."""
        return self.time_delta >= 0 or self.block_cache
