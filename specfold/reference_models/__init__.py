"""The two tiny models that come with the package: one per family, trained by ``tests/train_reference_models.py``.

They answer short arithmetic word problems and nothing else; see docs/reference_models.md.
"""

from __future__ import annotations

from pathlib import Path

NAMES = ("fast_dllm_v2", "nemotron_labs_diffusion")


def path(name: str) -> Path:
    """Folder of a bundled model. Raises ``ValueError`` for a name that is not in ``NAMES``."""
    if name not in NAMES:
        raise ValueError(f"no bundled model is called {name!r}; there are {' and '.join(NAMES)}.")
    return Path(__file__).parent / name
