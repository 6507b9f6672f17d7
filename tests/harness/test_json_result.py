import json
import math
import os

import pytest

from harness.errors import UsageError
from harness.jsonio import check_target, write_json


def test_numbers_that_are_not_finite_become_null(tmp_path):
    target = tmp_path / "r.json"
    write_json(
        {"a": [1.5, math.nan, (math.inf, -math.inf)], "b": {"c": "x", "d": None, "e": True}}, str(target)
    )
    assert json.loads(target.read_text()) == {
        "a": [1.5, None, [None, None]],
        "b": {"c": "x", "d": None, "e": True},
    }


def test_a_dash_is_stdout(capsys):
    write_json({"a": 1}, "-")
    assert json.loads(capsys.readouterr().out) == {"a": 1}


def test_a_file_is_replaced_whole_and_nothing_else_is_left(tmp_path):
    target = tmp_path / "r.json"
    target.write_text("old and much longer than the new text" * 10)
    write_json({"a": 1}, str(target))
    assert json.loads(target.read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["r.json"]


def test_a_value_that_json_cannot_hold_leaves_the_old_file(tmp_path):
    target = tmp_path / "r.json"
    target.write_text("old")
    with pytest.raises(TypeError):
        write_json({"a": object()}, str(target))
    assert (target.read_text(), os.listdir(tmp_path)) == ("old", ["r.json"])


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "r.json")
    write_json({"a": 1}, str(tmp_path / "link.json"))
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "r.json").read_text()) == {"a": 1}


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    write_json({"a": 1}, "/dev/null")
    assert not os.path.isfile("/dev/null")


@pytest.mark.parametrize(("target", "reason"), [("", "is a folder"), ("no/r.json", "does not exist")])
def test_an_unusable_target_is_refused_before_the_work(tmp_path, target, reason):
    with pytest.raises(UsageError, match=reason):
        check_target(str(tmp_path / target))
