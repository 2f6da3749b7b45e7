"""How long an iteration will take: the models of design section 7, learned online.

    prefill   T    = c0 + c1 Σ t_uc + c2 Σ A + c3 Σ t_rst     A = t_uc t_c + t_uc (t_uc + 1) / 2
    decode    T(B) = d0 + d1 φ(B) + d2 B                      φ(B) = 1 - (1 - k/E)^B

Work is summed over windows of fixed length and fitted by non-negative least squares of the
relative error. The fit is repeated with every window until the warm-up is over, then frozen. Off by
more than 15 % in 5 windows in a row, it is scaled to those windows (fitted to them alone if it
predicts no time at all for them) and fitted afresh from them on.
"""

from collections.abc import Sequence

import numpy as np

from evolving_infra.control.nnls import Array, nnls
from evolving_infra.errors import wrong

WINDOW_S = 1.0
SHORTEST_S = 1e-9
"""A window of less measured time says nothing; dividing by it could overflow."""
MIN_WINDOWS = 8
WARM_UP_WINDOWS = 30
DRIFT_SHARE = 0.15
DRIFT_WINDOWS = 5

DEFAULT_PREFILL = (2e-3, 2e-4, 0.0, 1e-5)
"""c0 s, c1 s/token, c2 s/pair, c3 s/token: 5,000 tokens/s, and restoring 20 times as fast."""
DEFAULT_DECODE = (5e-3, 5e-3, 1e-3)
"""d0 s, d1 s, d2 s/request."""
DEFAULT_FETCH = (2e-3, 5e-5)
"""f0 s, f1 s/block of a fetch, fitted in the same way: f0 + f1 · blocks."""


class FittedTime:
    """``seconds ≈ weights · features`` of one kind of iteration on one node.

    Before the first fit the defaults are used, scaled by measured over default seconds.
    """

    def __init__(self, default: Sequence[float]) -> None:
        self._default = np.array(default)
        self._weights: Array | None = None
        self._frozen = False
        self._rows: list[Array] = []
        self._window = np.zeros(len(default) + 1)
        self._window_start: float | None = None
        self._total = np.zeros(len(default) + 1)

    @property
    def is_learned(self) -> bool:
        """True once anything was measured."""
        return bool(self._total[-1] > 0)

    @property
    def is_frozen(self) -> bool:
        """True from the end of the warm-up until a drift."""
        return self._frozen

    def seconds(self, features: Sequence[float]) -> float:
        """Predicted time. O(features)."""
        return float(self.weights() @ np.array(features))

    def weights(self) -> Array:
        """``[features]`` float64: fitted, or the scaled defaults."""
        if self._weights is not None:
            return self._weights
        expected = float(self._default @ self._total[:-1])
        return self._default * (self._total[-1] / expected if expected > 0 else 1.0)

    def observe(self, features: Sequence[float], seconds: float, now: float) -> None:
        """Add one measured iteration. A window closes with the first one after its end."""
        if self._window_start is None:
            self._window_start = now
        elif now - self._window_start >= WINDOW_S:
            self._close_window()
            self._window_start = now
        row = np.array([*features, seconds])
        self._window += row
        self._total += row

    def _close_window(self) -> None:
        row = self._window
        self._window = np.zeros_like(row)
        if row[-1] < SHORTEST_S:
            return
        if self._frozen:
            self._watch(row)
            return
        self._rows.append(row)
        if len(self._rows) >= MIN_WINDOWS:
            self._fit()
        self._frozen = len(self._rows) >= WARM_UP_WINDOWS
        if self._frozen:
            self._rows.clear()

    def _fit(self) -> None:
        table = np.array(self._rows)
        relative = table[:, :-1] / table[:, -1:]
        self._weights = nnls(relative, np.ones(len(table)))

    def _watch(self, row: Array) -> None:
        """Count drifted windows in a row; enough of them begin the next warm-up."""
        error = abs(self.seconds(row[:-1].tolist()) - row[-1]) / row[-1]
        self._rows = [*self._rows, row] if error > DRIFT_SHARE else []
        if len(self._rows) == DRIFT_WINDOWS:
            drifted = np.sum(self._rows, axis=0)
            predicted = self.seconds(drifted[:-1].tolist())
            if predicted > 0:
                self._weights = self.weights() * (drifted[-1] / predicted)
            else:
                self._fit()
            self._frozen = False


class IterationTimes:
    """The models of all nodes. A node without measurements borrows those of another.

    Fetches between nodes have one model for all.
    """

    def __init__(self, expert_share: float) -> None:
        """``expert_share`` is k/E of the model's routed experts, 0 for a dense model."""
        self._expert_share = expert_share
        self._prefill: dict[str, FittedTime] = {}
        self._decode: dict[str, FittedTime] = {}
        self._fetch = FittedTime(DEFAULT_FETCH)

    def observe_prefill(
        self, node: str, seconds: float, work: tuple[int, int, int], now: float
    ) -> None:
        """``work`` is (uncached tokens, pairs, restored tokens), summed over the iteration."""
        model = self._prefill.setdefault(node, FittedTime(DEFAULT_PREFILL))
        model.observe((1.0, *work), seconds, now)

    def observe_decode(self, node: str, seconds: float, running: int, now: float) -> None:
        """``running`` requests each got their next token."""
        model = self._decode.setdefault(node, FittedTime(DEFAULT_DECODE))
        model.observe(self._decode_features(running), seconds, now)

    def observe_fetch(self, seconds: float, blocks: int, now: float) -> None:
        """A node has read ``blocks`` blocks from another. 0 blocks teach nothing: it gave up."""
        if blocks:
            self._fetch.observe((1.0, blocks), seconds, now)

    def fetch_seconds(self, blocks: int) -> float:
        """Reading ``blocks`` blocks from another node; 0 if there are none."""
        return self._fetch.seconds((1.0, blocks)) if blocks else 0.0

    def prefill_seconds(self, node: str, uncached: int, cached: int, restored: int) -> float:
        """One request computed in one iteration; arguments in tokens."""
        pairs = uncached * cached + uncached * (uncached + 1) // 2
        model = _model(self._prefill, node, DEFAULT_PREFILL)
        return model.seconds((1.0, uncached, pairs, restored))

    def decode_seconds(self, node: str, running: int) -> float:
        """One iteration over ``running`` requests; 0 if there are none."""
        if running == 0:
            return 0.0
        model = _model(self._decode, node, DEFAULT_DECODE)
        return model.seconds(self._decode_features(running))

    def is_learned(self, node: str) -> bool:
        """True once a prefill of ``node`` or of a node it borrows from was measured."""
        return _model(self._prefill, node, DEFAULT_PREFILL).is_learned

    def _decode_features(self, running: int) -> tuple[float, float, float]:
        coverage = 1.0 - (1.0 - self._expert_share) ** running
        return (1.0, coverage, float(running))


def check_amounts(**amounts: float) -> None:
    """``InputError`` if an amount is negative or not finite."""
    for name, amount in amounts.items():
        if not 0 <= amount < float("inf"):
            raise wrong(name, "a finite number, 0 or more", amount)


def _model(models: dict[str, FittedTime], node: str, default: Sequence[float]) -> FittedTime:
    own = models.get(node)
    if own is not None and own.is_learned:
        return own
    learned = sorted(name for name, model in models.items() if model.is_learned)
    return models[learned[0]] if learned else FittedTime(default)
