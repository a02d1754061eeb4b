"""Running code that a model wrote: no network, no files but its own, little time, little memory, then gone."""

from cluster.evaluation.sandbox.run import Limits, Verdict, require_sandbox, run_program

__all__ = ["Limits", "Verdict", "require_sandbox", "run_program"]
