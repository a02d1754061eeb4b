"""The run directory: parts, settings, lease, totals, and what a resumed run finds."""
