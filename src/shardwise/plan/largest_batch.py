"""Find the largest batch that fits."""

import math
from collections.abc import Callable, Mapping

from shardwise.plan.plan import Plan

# A guess is at most this multiple of the largest batch that is known to fit: a compilation far
# beyond the limit teaches little and takes long.
MAX_GROWTH = 8


def largest_batch(
    compile_size: Callable[[int], Plan], unit: int, first: int
) -> tuple[int, Plan | None]:
    """Return the largest batch size whose plan fits, and its plan.

    Memory grows almost linearly with the batch size, starting from that of the state. So a line
    through two known points predicts where the limit is, and few compilations are needed.

    Args:
        compile_size: returns the plan for a batch size.
        unit: the batch size is a multiple of this.
        first: the batch size to try first.

    Returns:
        The batch size and its plan, or `unit` and None if not even `unit` examples fit.
    """
    plans: dict[int, Plan] = {}
    size = max(first // unit, 1) * unit
    last_width = math.inf
    while True:
        plans[size] = compile_size(size)
        low = max((n for n, plan in plans.items() if plan.fits), default=0)
        high = min((n for n, plan in plans.items() if not plan.fits), default=math.inf)
        width = high - low
        if width <= unit:
            return (low, plans[low]) if low else (unit, None)
        guess = _limit_on_line(plans, size, low, high)
        is_bracketed = low > 0 and high < math.inf
        if is_bracketed and width > last_width / 2:
            # The last line did not even halve the interval.
            guess = (low + high) / 2
        last_width = width
        largest = MAX_GROWTH * low or high
        size = int(min(max(guess // unit * unit, low + unit), high - unit, largest))


def _limit_on_line(
    plans: Mapping[int, Plan], last: int, low: int, high: float
) -> float:
    """Return the batch size at which a line through two known points reaches the memory limit.

    The points are the largest size that fits and the smallest that does not. If one is missing,
    they are the two largest known sizes, where a batch of size 0 needs the memory of the state
    alone.
    """
    if high == math.inf:
        begin, end = sorted([0, *plans])[-2:]
    else:
        begin, end = low, int(high)
    begin_peak = plans[begin].memory.peak if begin else plans[last].memory.state
    end_peak = plans[end].memory.peak
    slope = max(end_peak - begin_peak, 1) / (end - begin)
    return begin + (plans[last].limit - begin_peak) / slope
