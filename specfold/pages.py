"""Prefix keys and values in pages of fixed size, shared by the samples of one prompt.

L layers, G key/value heads, D head width, W positions a page, S slots.
"""

from __future__ import annotations

import torch

from specfold.model import ModelSpec

PAGE_SIZE = 32


class PagePool:
    """Pages of K and V for all layers. Pages are counted references; the pool grows when it is out of free pages."""

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, num_pages: int = 64) -> None:
        self._shape = (PAGE_SIZE, spec.num_kv_heads, spec.head_dim)
        self.k = [torch.zeros((num_pages, *self._shape), device=device, dtype=dtype) for _ in range(spec.num_layers)]
        self.v = [torch.zeros_like(k) for k in self.k]
        self._references = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_used(self) -> int:
        return len(self._references) - len(self._free)

    def allocate(self) -> int:
        """A free page, owned once."""
        if not self._free:
            self._grow()
        page = self._free.pop()
        self._references[page] = 1
        return page

    def share(self, page: int) -> int:
        """The same page with one more owner."""
        self._references[page] += 1
        return page

    def copy(self, page: int) -> int:
        """A new page with the contents of another one."""
        fresh = self.allocate()
        for pool in (*self.k, *self.v):
            pool[fresh] = pool[page]
        return fresh

    def release(self, pages: list[int]) -> None:
        """Gives up one ownership of each page."""
        for page in pages:
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)

    def write(self, layer: int, page: torch.Tensor, offset: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes keys and values [N, G, D] to positions given by page and offset [N]."""
        self.k[layer][page, offset] = k
        self.v[layer][page, offset] = v

    def _grow(self) -> None:
        added = len(self._references)
        for pools in (self.k, self.v):
            for layer, pool in enumerate(pools):
                pools[layer] = torch.cat((pool, torch.zeros_like(pool)))
        self._references += [0] * added
        self._free += range(2 * added - 1, added - 1, -1)
