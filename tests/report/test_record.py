"""The record: whole or not at all, plain JSON, and a reader that refuses what is none."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tokensieve.errors import RecordError
from tokensieve.records import FORMAT, check_writable, differences, new_record, read_record, write_record


def _record(**changes: object):
    rows = [{"name": "a", "value": 1.5, "list": [1, 2]}]
    return new_record("test", {"alpha": 0.5}, changes.get("rows", rows), seed=3, threads=2)


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "run.json"
    record = _record()
    write_record(record, path)
    assert read_record(path) == record
    assert [p.name for p in path.parent.iterdir()] == ["run.json"]  # no temporary file stays


def test_says_where_and_with_what_it_ran() -> None:
    record = _record()
    assert record.hardware["cpu"]
    assert record.hardware["cores"] >= 1
    assert record.hardware["threads"] == 2
    assert {"python", "tokensieve", "torch"} <= set(record.versions)
    assert record.date.endswith("+00:00")


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_record(_record(rows=[{"a": math.nan, "b": (math.inf, 1.0), "c": {"d": -math.inf}}]), path)
    assert "NaN" not in path.read_text()
    assert read_record(path).rows == [{"a": None, "b": [None, 1.0], "c": {"d": None}}]


def test_a_failed_write_leaves_the_old_record(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_record(_record(), path)
    before = path.read_bytes()
    with pytest.raises(TypeError):
        write_record(_record(rows=[{"value": object()}]), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_the_reader_refuses_what_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_record(_record(), path)
    whole = path.read_text()
    less = json.loads(whole)
    del less["seed"]
    bad = {"cut.json": whole[: len(whole) // 2], "list.json": "[1]", "foreign.json": '{"metrics": {}}'}
    bad |= {"binary.json": "\x00\x01", "less.json": json.dumps(less), "old.json": whole.replace(FORMAT, "x-0")}
    for name, text in bad.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(RecordError, match=name) as caught:
            read_record(tmp_path / name)
        assert "\n" not in str(caught.value)
    (tmp_path / "latin.json").write_bytes(b"\xff\xfe{}")
    for name in ("latin.json", "absent.json"):
        with pytest.raises(RecordError, match=name):
            read_record(tmp_path / name)


def test_unwritable_places_are_found_beforehand(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "run.json"):
        with pytest.raises(RecordError, match="cannot write"):
            check_writable(path)
    with pytest.raises(RecordError, match="file is a file, not a folder"):
        check_writable(tmp_path / "file" / "deeper" / "run.json")
    assert not check_writable(tmp_path / "new.json").exists()


def test_differences_name_what_is_new_gone_or_another() -> None:
    was = {"seed": 1, "loss": {"tau": 0.5, "old": True}, "same": {"deep": {"x": 1}}}
    now = {"seed": 2, "loss": {"tau": 0.5, "new": [3]}, "same": {"deep": {"x": 1}}, "data": "cifar10"}
    assert differences(was, now) == [
        "seed was 1, is 2",
        "loss.old was True, is None",
        "loss.new was None, is [3]",
        "data was None, is 'cifar10'",
    ]
    assert differences(now, now) == []
