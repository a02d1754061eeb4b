"""What may look on while a run decodes: recorders of trajectories and of residuals. The torch backend alone is watched.

S slots, A computed branches, T block positions, E hidden width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from specfold.branches import BranchList
    from specfold.slots import SlotState
    from specfold.step import StepContext, StepResult


class Watch:
    """Looks at a run's steps and changes nothing. A run without one pays nothing for it."""

    num_ranks = 0
    """Position ranks to keep distributions for, even if the run's drafts need fewer."""
    num_tokens = 0
    """Token ranks to keep, likewise."""

    def before_step(self, slots: SlotState, context: StepContext) -> None:
        """The slots as a step finds them."""

    def on_branches(self, branches: BranchList, slots: SlotState, context: StepContext) -> None:
        """The branches that the step computes."""

    def on_hidden(self, layer: int, stage: str, h_ATE: torch.Tensor) -> None:
        """Residual streams where the gate looks at them: at a layer's ``entry``, or ``middle`` before its FFN."""

    def after_step(self, slots: SlotState, result: StepResult) -> None:
        """The slots as the step leaves them; nothing else happens between two steps but rows that enter and leave."""
