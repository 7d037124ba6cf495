"""Query parameters, after the ``?`` of an address. One that is given twice is refused."""

from __future__ import annotations

from collections import Counter

from fastapi import Depends, Request

from kvboost.serve.errors import ApiError
from kvboost.serve.problems import shown


def _check(request: Request) -> None:
    """Refuses a repeated parameter: programs differ in which of its values they use."""
    times = Counter(name for name, _ in request.query_params.multi_items())
    for name, number in times.items():
        if number > 1:
            raise ApiError(
                400,
                f"{shown(name)} is given {number} times in the address; give it once",
                param=name,
            )


EACH_ONCE = Depends(_check)
