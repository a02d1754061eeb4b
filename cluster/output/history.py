"""How far a session was at which second: a list of bounded length, however long the job runs."""

from __future__ import annotations

MAX_POINTS = 500
FIRST_EVERY_S = 0.5


class History:
    """Points ``[seconds since start, rows done, output tokens]``, evenly spaced in time.

    When it is full every second point goes, and from then on points come half as often.
    """

    def __init__(self) -> None:
        self._points: list[list[float]] = []
        self._every_s = FIRST_EVERY_S
        self._last: list[float] = [0.0, 0, 0]

    def add(self, seconds: float, rows: int, tokens: int) -> None:
        """Note where the job is; what comes too soon after the last point is kept only as the newest."""
        self._last = [round(seconds, 2), rows, tokens]
        if self._points and seconds - self._points[-1][0] < self._every_s:
            return
        self._points.append(self._last)
        if len(self._points) >= MAX_POINTS - 1:  # one place is for the newest
            self._points = self._points[::2]
            self._every_s *= 2

    def points(self) -> list[list[float]]:
        """All points, the newest among them."""
        if not self._points or self._points[-1] is self._last:
            return list(self._points)
        return [*self._points, self._last]
