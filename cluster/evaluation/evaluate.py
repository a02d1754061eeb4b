"""One evaluation from its plan to its exit code: decode every run, grade it, compare, write it down."""

from __future__ import annotations

from collections.abc import Set

from rich.console import Console
from rich.text import Text

from cluster.config import JobConfig, as_flags
from cluster.driver import DEFAULT_ENGINE
from cluster.driver.job import EXIT_FAILED
from cluster.driver.signals import Interrupted, StopSignals
from cluster.errors import UserError
from cluster.evaluation.comparison import TaskResult, VariantResult, compare, score
from cluster.evaluation.gradebook import Gradebook
from cluster.evaluation.plot import PLOT, can_plot, comparison_png
from cluster.evaluation.results import PAGE, RESULTS, results_json, write_samples
from cluster.evaluation.runs import Plan, PlannedRun, decode, make_plan
from cluster.evaluation.settings import EvaluationConfig
from cluster.evaluation.tables import markdown, sentences, terminal_tables
from cluster.output.storage import Store
from specfold import ConfigError, ModelError


class Evaluation:
    """Tasks in one or several variants."""

    def __init__(self, config: JobConfig, evaluation: EvaluationConfig, given: Set[str]) -> None:
        """``given``: names of the settings that the user has set."""
        self.settings = config, evaluation, given
        self._console = Console()

    def run(self, engine_factory: str = DEFAULT_ENGINE) -> int:
        """Do what is left to do; returns the exit code. Raises ``UserError``."""
        signals = StopSignals()
        try:
            with signals:
                return self._run(signals, engine_factory)
        except (ConfigError, ModelError) as error:
            raise UserError(as_flags(str(error))) from None
        except Interrupted as interrupted:
            signals.tell(interrupted.number, self._say)
            return interrupted.exit_code

    def _run(self, signals: StopSignals, engine_factory: str) -> int:
        plan = make_plan(*self.settings)
        code = decode(plan, self._say, signals, engine_factory)
        if code not in (0, EXIT_FAILED):
            return code
        results = self._grade(plan, signals)
        self._publish(plan, results)
        return code

    def _grade(self, plan: Plan, signals: StopSignals) -> list[TaskResult]:
        results = []
        for planned in plan.tasks:
            variants = []
            for run in plan.runs:
                if run.planned is planned:
                    variants.append(self._grade_run(run, signals))
            results.append(compare(variants))
        return results

    def _grade_run(self, run: PlannedRun, signals: StopSignals) -> VariantResult:
        self._say(f"Grading {run.task.name}, {run.variant.label}.")
        book = Gradebook(Store(run.config.output), run.task, run.items)
        _, evaluation, _ = self.settings
        workers, allowed = evaluation.grading_workers, evaluation.allow_code_execution
        graded = book.complete(run.config.num_samples, workers, allowed, signals.check)
        return score(run, graded)

    def _publish(self, plan: Plan, results: list[TaskResult]) -> None:
        for result in results:
            write_samples(plan.store, result)
        plan.store.write(PAGE, markdown(results).encode())
        plan.store.write(RESULTS, results_json(results))
        for result in results:
            for table in terminal_tables(result):
                self._console.print(table)
            for line in sentences(result):
                self._say(line)
        names = [PAGE, RESULTS]
        if len(plan.variants) > 1 and can_plot():
            plan.store.write(PLOT, comparison_png(results))
            names.append(PLOT)
        for name in names:
            self._say(f"Written: {plan.store.path(name)}")

    def _say(self, line: str) -> None:
        self._console.print(Text(line), highlight=False, soft_wrap=True)
