"""Prefix keys and values in pages of fixed size, shared by the samples of one prompt.

L layers, P pages, G key/value heads, D head width, W positions a page, S slots.
"""

from __future__ import annotations

import torch

from specfold.spec import ModelSpec

PAGE_SIZE = 32


class PagePool:
    """Pages of K and V for all layers, as counted references.

    ``k`` and ``v``: [L, P, W, G, D]. The pool doubles when it is out of free pages, unless it is ``fixed``: captured
    graphs hold its addresses, and its size is part of a memory plan.
    """

    def __init__(
        self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, num_pages: int = 64, fixed: bool = False
    ) -> None:
        shape = (spec.num_layers, num_pages, PAGE_SIZE, spec.num_kv_heads, spec.head_dim)
        self.k = torch.zeros(shape, device=device, dtype=dtype)
        self.v = torch.zeros_like(self.k)
        self.fixed = fixed
        self._references = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_pages(self) -> int:
        return len(self._references)

    @property
    def num_used(self) -> int:
        return len(self._references) - len(self._free)

    def has_room(self, num_pages: int) -> bool:
        """Whether that many pages can be allocated now."""
        return not self.fixed or num_pages <= len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Free pages, owned once. Only after ``has_room``."""
        while len(self._free) < count:
            self._grow()
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: list[int]) -> list[int]:
        """The same pages with one more owner."""
        for page in pages:
            self._references[page] += 1
        return list(pages)

    def copy(self, page: int, target: int) -> None:
        """The contents of one page into another."""
        for pool in (self.k, self.v):
            pool[:, target] = pool[:, page]

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
        if self.fixed:
            raise RuntimeError("A page pool of fixed size has no free page; has_room was not asked.")
        added = len(self._references)
        self.k, self.v = (torch.cat((pool, torch.zeros_like(pool)), dim=1) for pool in (self.k, self.v))
        self._references += [0] * added
        self._free += range(2 * added - 1, added - 1, -1)


def pages_for(num_positions: int) -> int:
    """Pages that hold that many positions."""
    return -(-num_positions // PAGE_SIZE)
