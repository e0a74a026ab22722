"""What is said of other libraries' errors: in one line, whole words, the place in a file."""

from __future__ import annotations

import logging

import pytest

from tokensieve.errors import OptionError, one_line
from tokensieve.utils.hub import quiet_hub
from tokensieve.utils.yaml import safe_yaml


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
        ("a: 1\nb: [1, 2\n", "file is no YAML, line 3, column 1: "),
        ("a: 1\n\tb: 2\n", "file is no YAML, line 2, column 1: "),
        ("a: !!python/object:os.system {}\n", "file is no YAML, line 1, column 4: could not determine a constructor"),
        ("a: \x01", "file is no YAML, character 4: "),
        ("a: 2024-13-45", "file is no YAML: month must be in 1..12"),
        ("[" * 5000, "file is no YAML: "),
    ],
)
def test_a_text_that_is_no_yaml_is_named_with_its_line(text: str, said: str) -> None:
    with pytest.raises(OptionError) as caught:
        safe_yaml(text, "file")
    assert str(caught.value).startswith(said)
    assert "unicode string" not in str(caught.value)
    assert "\n" not in str(caught.value)


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
