"""What is said of other libraries' errors: in one line, whole words, the place in a file."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from tokensieve.errors import MissingMaterialError, OptionError, one_line
from tokensieve.utils.hub import quiet_hub
from tokensieve.utils.progress import bars
from tokensieve.utils.yaml import read_config, safe_yaml


def test_one_line_is_cut_between_words() -> None:
    assert one_line(ValueError("two\n  lines")) == "two lines"
    assert one_line(KeyError()) == "KeyError"
    long = one_line(ValueError("word " * 100), 40)
    assert len(long) <= 40
    assert long.endswith("word ...")
    path = one_line(FileNotFoundError("/very/long/path" * 20 + " is not there"), 80)
    assert path.startswith("/very/long/path")
    assert len(path) <= 80


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: [1, 2\n", "file is not valid YAML, line 3, column 1: "),
        ("a: 1\n\tb: 2\n", "file is not valid YAML, line 2, column 1: "),
        (
            "a: !!python/object:os.system {}\n",
            "file is not valid YAML, line 1, column 4: could not determine a constructor",
        ),
        ("a: \x01", "file is not valid YAML, character 4: "),
        ("a: 2024-13-45", "file is not valid YAML: month must be in 1..12"),
        ("[" * 5000, "file is not valid YAML: "),
    ],
)
def test_a_text_that_is_no_yaml_is_named_with_its_line(text: str, said: str) -> None:
    with pytest.raises(OptionError) as caught:
        safe_yaml(text, "file")
    assert str(caught.value).startswith(said)
    assert "unicode string" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_config_file_is_keys_with_values(tmp_path: Path) -> None:
    file = tmp_path / "c.yml"
    with pytest.raises(MissingMaterialError, match=r"--config .*c\.yml cannot be read: No such file"):
        read_config(file)
    for text, found in (("", {}), ("# nothing yet\n", {}), ("a: 1\nb: {c: [2]}\n", {"a": 1, "b": {"c": [2]}})):
        file.write_text(text)
        assert read_config(file) == found
    for text, kind in (("- a\n", "list"), ("word", "str"), ("3", "int")):
        file.write_text(text)
        with pytest.raises(OptionError, match=rf"--config .*c\.yml: expected keys with values, found a {kind}$"):
            read_config(file)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OptionError, match=r"--config .*c\.yml is not a text file"):
        read_config(file)


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with bars({"images": None}) as shown:
        shown.to("images", 1, 3)
        shown.tell("[b]one[/b]")
    assert capsys.readouterr() == ("[b]one[/b]\n", "")
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("COLUMNS", "100")):
        monkeypatch.setenv(name, value)
    with bars({"images": None, "steps": 7}) as shown:
        shown.further("steps", 2, label="warm-up")
        shown.to("images", 1, 3)
        shown.tell("[b]one[/b]")
    said = capsys.readouterr()
    assert said.out == ""
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said.err)
    assert all(word in plain for word in ("[b]one[/b]\n", "1/3", "2/7", "warm-up"))


def test_attempts_to_download_are_not_told(caplog: pytest.LogCaptureFixture) -> None:
    hub, root = logging.getLogger("huggingface_hub.utils._http"), logging.getLogger()
    before = logging.getLogger("huggingface_hub").level
    with quiet_hub():
        hub.warning("Retrying in 1s [Retry 1/5].")
        root.error("Failed to download weights for tag 'openai'")
        root.error("something else")
    assert [record.getMessage() for record in caplog.records] == ["something else"]
    assert logging.getLogger("huggingface_hub").level == before
    assert not root.filters
