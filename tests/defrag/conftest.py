from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_status_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counter files of the tests stay out of the user's folder."""
    monkeypatch.setenv("KDTREE_STATUS", str(tmp_path / "status"))
