"""Non-negative least squares: ``argmin |A x - b|`` over ``x ≥ 0``.

The active-set method of Lawson and Hanson (Solving Least Squares Problems, 1974, chapter 23).
"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

TOLERANCE = 1e-10


def nnls(matrix: Array, target: Array) -> Array:
    """Solve for a small number of columns.

    Args:
        matrix: ``[rows, columns]`` float64. Columns are scaled inside, so units don't matter.
        target: ``[rows]`` float64.

    Returns:
        ``[columns]`` float64, none negative. Columns of zeros get 0.
    """
    norms: Array = np.linalg.norm(matrix, axis=0)
    norms[norms == 0] = 1.0
    scaled = matrix / norms
    free = np.zeros(scaled.shape[1], dtype=bool)
    solution = np.zeros(scaled.shape[1])
    limit = TOLERANCE * max(1.0, float(np.linalg.norm(target)))
    for _ in range(3 * len(free) + 3):
        gradient = scaled.T @ (target - scaled @ solution)
        gradient[free] = -np.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= limit:
            break
        free[best] = True
        solution = _step_back(scaled, target, solution, free)
    return solution / norms


def _step_back(matrix: Array, target: Array, solution: Array, free: NDArray[np.bool_]) -> Array:
    """Solve over the free columns; pin those that would turn negative until none does."""
    while True:
        wanted: Array = np.zeros_like(solution)
        wanted[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
        negative = np.flatnonzero(free & (wanted <= 0))
        if not len(negative):
            return wanted
        falls = solution[negative] - wanted[negative]
        steps = np.where(falls > 0, solution[negative] / np.where(falls > 0, falls, 1.0), 0.0)
        first = int(np.argmin(steps))
        solution = solution + steps[first] * (wanted - solution)
        solution[negative[first]] = 0.0  # exactly, whatever the rounding
        free &= solution > 0
