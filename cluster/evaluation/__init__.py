"""Benchmarks through the job: tasks as files, prompts with few-shot examples, graders, statistics. Knows no model."""
