"""Every setting: its default, what it accepts, and the one error it gives."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_glue.settings import (
    CaptureWhen,
    Mode,
    Settings,
    SettingsError,
    default_status_folder,
)


def test_defaults_are_off_and_automatic():
    settings = Settings.from_env({})
    assert settings.mode is Mode.OFF
    assert settings.nsplit is None and settings.form == "auto" and settings.capture is None
    assert settings.status_folder == default_status_folder()


@pytest.mark.parametrize("mode", ["off", "validate", "on"])
def test_modes(mode):
    assert Settings.from_env({"KDTREE_VERIFY": mode}).mode.value == mode


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("KDTREE_VERIFY", "yes", "off, validate, on"),
        ("KDTREE_VERIFY", "ON", "off, validate, on"),
        ("KDTREE_FORM", "pair", "auto, cluster, single"),
        ("KDTREE_NSPLIT", "0", "auto or a whole number"),
        ("KDTREE_NSPLIT", "2.5", "auto or a whole number"),
        ("KDTREE_THRESHOLD", "nan", "above 0"),
        ("KDTREE_THRESHOLD", "2", "above 0"),
        ("KDTREE_THRESHOLD", "small", "above 0"),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(name, value, says):
    with pytest.raises(SettingsError, match=f"{name}=.*{says}"):
        Settings.from_env({name: value})


def test_a_misspelt_name_is_an_error_rather_than_off():
    with pytest.raises(SettingsError, match="KDTREE_VERFIY is not a setting; expected one of KDTREE_VERIFY"):
        Settings.from_env({"KDTREE_VERFIY": "on"})


def test_defragmentation_settings_are_left_to_their_owner():
    assert Settings.from_env({"KDTREE_DEFRAG": "sort"}).mode is Mode.OFF


def capture_env(folder: Path, **more: str) -> dict[str, str]:
    return {"KDTREE_VERIFY": "validate", "KDTREE_CAPTURE": str(folder), **more}


def test_capture_defaults_and_folder_is_made(tmp_path):
    capture = Settings.from_env(capture_env(tmp_path / "a" / "b")).capture
    assert capture is not None and capture.folder.is_dir()
    assert capture.layers == frozenset({0}) and capture.every == 100 and capture.when is CaptureWhen.ALL
    assert capture.max_bytes == 2**30


@pytest.mark.parametrize(("text", "size"), [("1000", 1000), ("3K", 3072), ("2m", 2 * 2**20), ("1G", 2**30)])
def test_byte_limit_units(tmp_path, text, size):
    capture = Settings.from_env(capture_env(tmp_path, KDTREE_CAPTURE_BYTES=text)).capture
    assert capture is not None and capture.max_bytes == size


@pytest.mark.parametrize(("text", "layers"), [("all", None), ("3", {3}), ("0, 30,60", {0, 30, 60})])
def test_capture_layers(tmp_path, text, layers):
    capture = Settings.from_env(capture_env(tmp_path, KDTREE_CAPTURE_LAYERS=text)).capture
    assert capture is not None and capture.layers == (None if layers is None else frozenset(layers))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KDTREE_CAPTURE_LAYERS", "0,x"),
        ("KDTREE_CAPTURE_LAYERS", "-1"),
        ("KDTREE_CAPTURE_EVERY", "0"),
        ("KDTREE_CAPTURE_WHEN", "never"),
        ("KDTREE_CAPTURE_MAX_PREFIX", "many"),
        ("KDTREE_CAPTURE_BYTES", "1T"),
        ("KDTREE_CAPTURE_BYTES", "G"),
    ],
)
def test_bad_capture_values(tmp_path, name, value):
    with pytest.raises(SettingsError, match=name):
        Settings.from_env(capture_env(tmp_path, **{name: value}))


def test_capture_needs_a_mode_that_patches(tmp_path):
    with pytest.raises(SettingsError, match="needs KDTREE_VERIFY=validate or on"):
        Settings.from_env({"KDTREE_CAPTURE": str(tmp_path)})


def test_mismatch_capture_needs_validate(tmp_path):
    env = capture_env(tmp_path, KDTREE_CAPTURE_WHEN="mismatch", KDTREE_VERIFY="on")
    with pytest.raises(SettingsError, match="needs KDTREE_VERIFY=validate"):
        Settings.from_env(env)


def test_sampling_without_a_folder_is_an_error():
    with pytest.raises(SettingsError, match="KDTREE_CAPTURE_EVERY is set, but KDTREE_CAPTURE names no folder"):
        Settings.from_env({"KDTREE_CAPTURE_EVERY": "5"})


def test_a_capture_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="KDTREE_CAPTURE="):
        Settings.from_env(capture_env(tmp_path / "file" / "below"))


def test_off_imports_next_to_nothing():
    code = "import sys; from sglang_glue.plugin import register; register(); print(*sorted(sys.modules))"
    env = {k: v for k, v in os.environ.items() if not k.startswith("KDTREE_")}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    loaded = set(ran.stdout.split())
    assert not loaded & {"torch", "numpy", "numba", "sglang", "verify_numba", "captured_tensors"}
