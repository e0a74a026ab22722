"""The command line: exit codes, messages of one line, and a start without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tokensieve.cli import bench
from tokensieve.cli.main import COMMANDS, main
from tokensieve.methods.registry import list_methods
from tokensieve.records import new_record, read_record
from tokensieve.tasks.arguments import Parser, take_pairs
from tokensieve.tasks.bench.config import SHARE_METHODS, BenchConfig


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    try:
        code = main(argv)
    except SystemExit as left:  # argparse's own --help and --version
        code = left.code or 0
    out = capsys.readouterr()
    return code, out.out, out.err


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that a wrong command line gets."""
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.startswith("tokensieve: error: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("argv", [["--help"], ["methods"], ["bench", "--help"], ["bnech"], ["bench", "--keep", "2.5"]])
def test_starts_without_torch(argv: list[str]) -> None:
    code = (
        "import sys\nfrom tokensieve.cli.main import main\n"
        f"try: main({argv!r})\nexcept SystemExit: pass\n"
        "print('loaded', sorted({'torch', 'rich', 'open_clip', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded []"


def test_help_lists_every_command_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ((), ("--help",), ("-h",)):
        code, out, _ = run(capsys, *argv)
        assert code == 0
        assert all(name in out for name in COMMANDS)
        assert "examples:" in out
    for name in COMMANDS:
        code, out, _ = run(capsys, name, "--help")
        assert code == 0
        assert "examples:" in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import tokensieve

    assert run(capsys, "--version")[:2] == (0, f"tokensieve {tokensieve.__version__}\n")


def test_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "tokensieve.cli", "methodz"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert 'Did you mean "methods"?' in done.stderr
    assert "Traceback" not in done.stderr


def test_wrong_names_get_the_nearest_right_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert 'Did you mean "bench"?' in refused(capsys, "bnech")
    assert 'Did you mean "tome"?' in refused(capsys, "methods", "tomme")
    assert 'Did you mean "--batch"?' in refused(capsys, "bench", "--batchs", "1")
    assert 'Did you mean "sieve"?' in refused(capsys, "bench", "--methods", "seive")
    assert 'Did you mean "vit-s14"?' in refused(capsys, "bench", "--models", "vit-s15")
    assert 'Did you mean "linear"?' in refused(capsys, "bench", "--schedule", "lineal")
    assert "--version" in refused(capsys, "--verzion")
    assert 'Did you mean "--trials"?' in refused(capsys, "search", "clip", "--trails", "3")
    assert 'Did you mean "--objectives"?' in refused(capsys, "search", "vlm", "--objective", "macs")


def test_wrong_values_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--batch" in refused(capsys, "bench", "--batch", "many")
    assert "batch 0" in refused(capsys, "bench", "--batch", "0")
    assert "rounds 0" in refused(capsys, "bench", "--rounds", "0")
    assert "1.5" in refused(capsys, "bench", "--keep", "1.5")
    assert "keep=0" in refused(capsys, "bench", "--keep", "0")
    assert "2.5" in refused(capsys, "sweep", "--methods", "evit", "--keep", "0.5", "2.5", "-o", "nowhere")
    assert "--trials 0" in refused(capsys, "search", "clip", "--trials", "0")
    assert "'half'" in refused(capsys, "bench", "--keep", "half")
    assert "0.5,0.2" in refused(capsys, "bench", "--keep", "0.5,0.2")
    assert "cuda:99" in refused(capsys, "bench", "--device", "cuda:99")
    assert "ModifiedResNet" in refused(capsys, "bench", "--models", "RN50", "--batch", "1")


def test_an_unwritable_output_is_found_before_measuring(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_measure", lambda config: pytest.fail("measured"))
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "bench.json"):
        assert str(path) in refused(capsys, "bench", "-o", str(path))


def test_bench_prints_its_tables_and_writes_the_record(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"part": "memory", "model": "m", "batch": 1, "method": "tome", "keep": 0.5, "stock_bytes": 2**21}
    row |= {"reduced_bytes": 2**20, "ratio": 0.5, "target": 1.0, "met": True}
    monkeypatch.setattr(bench, "_measure", lambda config: new_record("bench", vars(config), [row]))
    path = tmp_path / "runs" / "bench.json"
    code, out, _ = run(capsys, "bench", "--quick", "--memory", "--keep", "60", "0.5", "-o", str(path))
    assert code == 0
    assert "1 of 1 targets met" in out
    assert "0.500" in out
    record = read_record(path)
    assert record.rows == [row]
    assert record.config["keep"] == [60, 0.5]
    assert record.config["parts"] == ["memory"]


def test_bench_says_what_its_rounds_cannot_tell(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"part": "speed", "model": "m", "batch": 1, "method": "tome", "keep": 0.5, "tokens_per_layer": [9, 5]}
    row |= {"macs": 1e9, "ms": 2.0, "ms_quartiles": [1.9, 2.1], "speedup": 1.2, "possible": 1.3, "target": 0.9}
    known = row | {"gained_of_possible": 0.923, "gained_interval": [0.91, 0.94], "met": True, "sure": True}
    unknown = row | {"gained_of_possible": 0.917, "gained_interval": [0.85, 0.96], "met": True, "sure": False}
    monkeypatch.setattr(bench, "_measure", lambda config: new_record("bench", vars(config), [known, unknown]))
    _, out, _ = run(capsys, "bench", "--quick", "-o", str(tmp_path / "bench.json"))
    first, second = (line for line in out.splitlines() if "tome" in line)
    assert "0.923 [0.91, 0.94]" in first
    assert "unsure" not in first
    assert "0.917 [0.85, 0.96]" in second
    assert "met, unsure" in second
    assert "2 of 2 targets met (1 unsure" in out


def test_interrupted_leaves_no_record(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(config: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "_measure", interrupted)
    code, _, err = run(capsys, "bench", "-o", str(tmp_path / "bench.json"))
    assert code == 130
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_methods_lists_all_and_shows_one(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "methods")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(list_methods())
    code, out, _ = run(capsys, "methods", "anchor")
    assert code == 0
    assert "alpha = 0.5" in out
    assert "Keep k anchors" in out
    assert "one cut" in run(capsys, "methods", "divprune")[1]


@pytest.mark.parametrize(
    ("absent", "argv", "extra"),
    [
        ("pydantic", ["train", "reid", "--config", "configs/synthetic/DeMo_SDTPS.yml"], "train"),
        ("transformers", ["bench", "--vlm", "--rounds", "1"], "transformers"),
    ],
)
def test_an_extra_that_is_not_installed_is_named(absent: str, argv: list[str], extra: str) -> None:
    said = f'tokensieve: error: this needs {absent}: pip install "tokensieve[{extra}]"'
    assert refused_without(absent, argv) == said


def test_a_search_names_its_own_extra() -> None:
    assert refused_without("pydantic", ["search", "clip"]).endswith('pip install "tokensieve[search]"')


def refused_without(absent: str, argv: list[str]) -> str:
    """The one line that a command gets where this package is not installed."""
    code = f"import sys\nsys.modules[{absent!r}] = None\nfrom tokensieve.cli.main import main\nsys.exit(main({argv!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


def test_any_other_missing_module_is_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokensieve.cli.plan", None)
    with pytest.raises(ModuleNotFoundError):
        main(["plan"])


def test_bench_takes_its_methods_for_the_share_too() -> None:
    def config(*argv: str) -> BenchConfig:
        parser = Parser()
        bench.add_arguments(parser)
        return bench._config(parser.parse(argv))

    assert config("--share", "--methods", "sieve").share_methods == ("sieve",)
    assert config("--share").share_methods == SHARE_METHODS
    assert config("--vlm", "--share", "--methods", "fastv").share_methods == SHARE_METHODS


def test_plan_has_a_budget_whatever_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["plan", "--model", "ViT-B-16", "--method"]
    _, plain, _ = run(capsys, *given, "sieve")
    code, weighed, _ = run(capsys, *given, "sieve", "weight=0.5")
    assert code == 0
    assert weighed == plain  # an option that is not a budget leaves the default of 0.4
    _, plain, _ = run(capsys, *given, "anchor")
    _, weighed, _ = run(capsys, *given, "anchor", "alpha=0.5")
    assert weighed == plain
    _, own, _ = run(capsys, *given, "anchor", "k=8", "m=24")
    assert " 33 " in own  # CLS and k + m
    assert "is a list" in refused(capsys, *given, "sieve", "--keep_average", "0.7,0.5")


@pytest.mark.parametrize(
    ("words", "pairs"),
    [
        (["--method", "fastv", "fold=True"], ["fold=True"]),
        (["--method=fastv", "fold=True"], ["fold=True"]),
        (["fold=True", "k=3", "--keep", "3"], ["fold=True", "k=3"]),
        (["--method_option", "fold=True"], []),
        (["-o", "k=1.json"], []),
        (["--switch", "fold=True"], ["fold=True"]),
        (["--flag", "fold=True"], []),
    ],
)
def test_pairs_that_are_no_flags_values(words: list[str], pairs: list[str]) -> None:
    parser = Parser()
    parser.add_argument("--switch", action="store_true")
    parser.add_argument("--flag")
    found, rest = take_pairs(words, parser)
    assert found == pairs
    assert sorted([*found, *rest]) == sorted(words)
