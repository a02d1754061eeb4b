"""Outputs with known grades: right answers of benchmarks, texts of our own, and what other people's graders say."""
