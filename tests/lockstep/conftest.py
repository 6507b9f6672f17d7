"""Fixtures of the lockstep tests."""

from __future__ import annotations

import pytest

from tests.lockstep.support import FORMS
from verify_numba.geometry import Geometry


@pytest.fixture(params=FORMS, ids=lambda g: g.name)
def form(request: pytest.FixtureRequest) -> Geometry:
    """Each variant of the kernel."""
    g = request.param
    assert isinstance(g, Geometry)
    return g
