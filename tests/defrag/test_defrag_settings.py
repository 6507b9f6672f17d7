"""Settings: off by default, and one clear error for a bad one."""

from __future__ import annotations

import pytest

from sglang_glue.defrag import sglang_hooks
from sglang_glue.defrag.settings import DefragSettings, DefragSettingsError, Tier


def test_off_by_default() -> None:
    assert DefragSettings.from_env({}) == DefragSettings()
    assert DefragSettings.from_env({}).tier is Tier.OFF


def test_all_settings() -> None:
    env = {
        "KDTREE_DEFRAG": "relocate",
        "KDTREE_DEFRAG_BUDGET": "16M",
        "KDTREE_DEFRAG_INTERVAL": "100",
        "KDTREE_DEFRAG_LOW": "4",
        "KDTREE_DEFRAG_HIGH": "12.5",
        "KDTREE_DEFRAG_BLOCK": "0",
    }
    assert DefragSettings.from_env(env) == DefragSettings(Tier.RELOCATE, 16 << 20, 100, 4.0, 12.5, 0)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"KDTREE_DEFRAG": "on"}, "KDTREE_DEFRAG='on': expected one of off, sort, relocate"),
        ({"KDTREE_DEFRAG_BUGDET": "1"}, "KDTREE_DEFRAG_BUGDET is not a setting"),
        ({"KDTREE_DEFRAG_BUDGET": "lots"}, "KDTREE_DEFRAG_BUDGET='lots': expected bytes"),
        (
            {"KDTREE_DEFRAG_INTERVAL": "0"},
            "KDTREE_DEFRAG_INTERVAL='0': expected a whole number of at least 1",
        ),
        ({"KDTREE_DEFRAG_LOW": "nan"}, "KDTREE_DEFRAG_LOW='nan': expected a run length"),
        (
            {"KDTREE_DEFRAG_LOW": "64"},
            "KDTREE_DEFRAG_LOW=64: expected at most KDTREE_DEFRAG_HIGH, which is 32",
        ),
        ({"KDTREE_DEFRAG_BLOCK": "-1"}, "KDTREE_DEFRAG_BLOCK='-1': expected a whole number of at least 0"),
    ],
)
def test_a_bad_setting_is_named(env: dict[str, str], message: str) -> None:
    with pytest.raises(DefragSettingsError, match=message):
        DefragSettings.from_env(env)


def test_a_bad_setting_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang logs and forgets every other exception of a plug-in."""
    monkeypatch.setenv("KDTREE_DEFRAG", "yes")
    with pytest.raises(SystemExit, match="KDTREE_DEFRAG='yes'"):
        sglang_hooks.register()


def test_off_touches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDTREE_DEFRAG", "off")
    monkeypatch.setitem(
        __import__("sys").modules, "sglang.srt.plugins.hook_registry", None
    )  # an import would raise
    sglang_hooks.register()
