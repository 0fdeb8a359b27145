import os
import signal
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: threads that wait in turns are slow
tests = Path(__file__).resolve().parent
# A shell ignores Ctrl-C in what it starts with `&`, children inherit that, and bash can't trap what was ignored then.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path[:0] = [str(tests), str(tests.parent)]


@pytest.fixture
def record_ratios(monkeypatch):
    """record_ratios(script) -> a list that fills with the probability ratios of each minibatch it trains on."""

    def record(script):
        ratios, gradient = [], script.minibatch_gradient

        def spy(*inputs):
            log_ratio, losses = gradient(*inputs)
            ratios.append(log_ratio.exp())
            return log_ratio, losses

        monkeypatch.setattr(script, "minibatch_gradient", spy)
        return ratios

    return record
