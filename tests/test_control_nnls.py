"""Non-negative least squares against a search over all supports."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evolving_infra.control.nnls import nnls


def brute_force(matrix, target) -> float:
    """Least residual over every set of columns whose free solution is not negative."""
    best = float(np.linalg.norm(target))
    columns = range(matrix.shape[1])
    for size in range(1, matrix.shape[1] + 1):
        for support in itertools.combinations(columns, size):
            part = matrix[:, support]
            solution = np.linalg.lstsq(part, target, rcond=None)[0]
            if (solution >= 0).all():
                best = min(best, float(np.linalg.norm(part @ solution - target)))
    return best


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 9), st.integers(1, 4))
def test_residual_equals_brute_force(seed, rows, columns) -> None:
    random = np.random.default_rng(seed)
    matrix = random.normal(size=(rows, columns))
    target = random.normal(size=rows)
    solution = nnls(matrix, target)
    assert (solution >= 0).all()
    residual = float(np.linalg.norm(matrix @ solution - target))
    assert residual == pytest.approx(brute_force(matrix, target), rel=1e-9, abs=1e-9)


@settings(deadline=None)
@given(st.integers(0, 10_000))
def test_units_do_not_matter(seed) -> None:
    random = np.random.default_rng(seed)
    matrix = random.uniform(size=(20, 4)) * np.array([1.0, 1e4, 1e9, 1e3])
    truth = random.uniform(size=4) / np.array([1.0, 1e4, 1e9, 1e3])
    assert nnls(matrix, matrix @ truth) == pytest.approx(truth, rel=1e-6)


def test_columns_of_zeros_get_zero() -> None:
    matrix = np.array([[1.0, 0.0], [2.0, 0.0]])
    assert nnls(matrix, np.array([2.0, 4.0])).tolist() == pytest.approx([2.0, 0.0])


def test_equal_columns_end() -> None:
    matrix = np.ones((5, 3))
    assert nnls(matrix, np.full(5, 3.0)).sum() == pytest.approx(3.0)
