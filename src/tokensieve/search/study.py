"""The study: an Optuna study in a file, held by one process, that survives SIGKILL and goes on where it was.

A trial that was running when its process died is marked failed and asked for again with the same values; what has
ended is never run again; the total counts over restarts. Trials do not depend on how often the search was interrupted:
the sampler is seeded by the number of values drawn so far. Imports Optuna inside functions.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokensieve.errors import (
    MissingMaterialError,
    OptionError,
    RecordError,
    TokensieveError,
    UnknownNameError,
    nearest,
    one_line,
)
from tokensieve.records import check_writable
from tokensieve.search.settings import Objective, SearchSettings
from tokensieve.search.space import Space, draw
from tokensieve.utils.files import system_errors

__all__ = ["Asked", "Found", "StudyFile", "UnknownObjectiveError", "import_optuna", "open_study"]

_NAME = "tokensieve"
_SQLITE, _JOURNAL = (".db", ".sqlite", ".sqlite3"), (".log", ".journal")


class UnknownObjectiveError(UnknownNameError):
    """The settings ask for a figure that no run has: to go on would be of no use."""


@dataclass(frozen=True)
class Found:
    """What a trial's run found. figures: by name, the objectives among them. record: a result of `tokensieve eval`.

    made: files that the run left in the trial's folder, by name. files: their content, where that folder is on another
    machine.
    """

    figures: Mapping[str, float]
    record: Mapping[str, Any] | None = None
    made: Mapping[str, Path] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Asked:
    """A trial to run. number: of the trial. origin: of the first attempt at it, the same where this is that."""

    number: int
    origin: int
    params: dict[str, Any]
    trial: Any = field(repr=False, compare=False)


def import_optuna() -> Any:
    """Optuna, quiet."""
    try:
        import optuna
    except ImportError:
        raise MissingMaterialError('a search needs Optuna: pip install "tokensieve[search]"') from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


@contextmanager
def open_study(
    path: Path, settings: SearchSettings, objectives: Sequence[Objective], space: Space, facts: Mapping[str, Any]
) -> Iterator[StudyFile]:
    """The study of a file, made or taken up. facts: plain data that say what is searched; a study of other facts, or
    one that another process is at, is an error. Trials that were running when their process died wait to run again.
    """
    optuna = import_optuna()
    if path.suffix not in (*_SQLITE, *_JOURNAL):
        known = ", ".join((*_SQLITE, *_JOURNAL))
        raise OptionError(f"the study {path} has no ending that says its kind: {known}")
    check_writable(path)
    with _held(path), _full_disk_named(path):
        try:
            storage = _storage(path)
            store = StudyFile(_study(storage, objectives), settings, objectives, space)
        except _storage_errors() as error:
            if _is_full(error):
                raise
            raise _no_study(path, error) from None
        if not store.check(path, facts):
            optuna.delete_study(study_name=_NAME, storage=storage)
            _clear(path.parent / "trials")  # their numbers are used again
            store = StudyFile(_study(storage, objectives), settings, objectives, space)
            store.check(path, facts)
        store.take_up()
        yield store


def _clear(folder: Path) -> None:
    """Remove what the trials of a study that is made anew have left."""
    for place in folder.glob("[0-9][0-9][0-9][0-9]*"):
        if place.is_dir():
            shutil.rmtree(place)
        else:
            place.unlink()


def _study(storage: Any, objectives: Sequence[Objective]) -> Any:
    return import_optuna().create_study(
        storage=storage, study_name=_NAME, directions=[o.direction for o in objectives], load_if_exists=True
    )


def _storage_errors() -> tuple[type[Exception], ...]:
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    return StorageInternalError, SQLAlchemyError, ValueError, KeyError  # the last two: of a journal that is none


def _no_study(path: Path, error: Exception) -> RecordError:
    reason = one_line(error, 120)
    return RecordError(f"{path} is not a study that can be read ({reason}): name another file, or remove it")


def _is_full(error: BaseException) -> bool:
    """Whether a storage's error is that nothing can be written: SQLite's words for it, or the system's."""
    words = str(error).lower()
    system = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return system or any(part in words for part in ("disk is full", "disk i/o error", "no space left"))


@contextmanager
def _full_disk_named(path: Path) -> Iterator[None]:
    """A full disk, at any moment of a search, as an error that says so."""
    kinds: tuple[type[Exception], ...] = (*_storage_errors(), OSError)
    try:
        yield
    except TokensieveError:
        raise
    except kinds as error:
        if not _is_full(error):
            raise
        raise RecordError(
            f"cannot write {path}: no space left on the disk; make room and run the same command again: what ended "
            "before is kept"
        ) from None


@contextmanager
def _held(path: Path) -> Iterator[None]:
    """The file is this process's alone. The lock goes with its holder, however that ends."""
    with system_errors(f"cannot write {path}"):
        mark = path.with_name(f".{path.name}.held").open("w")
    with mark as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RecordError(f"{path}: another process works on this search") from None
        yield


def _storage(path: Path) -> Any:
    from optuna.storages import JournalStorage, RDBStorage
    from optuna.storages.journal import JournalFileBackend

    if path.suffix in _SQLITE:
        return RDBStorage(f"sqlite:///{path}", engine_kwargs={"connect_args": {"timeout": 60}})
    _repair_config(path)
    return JournalStorage(JournalFileBackend(str(path)))


def _repair_config(path: Path) -> None:
    """Take off a journal's last line where a killed process wrote half of it, and the lock that it left.

    Optuna would append to the half line, and refuse to read what comes of it.
    """
    lock = path.with_name(f"{path.name}.lock")
    lock.unlink(missing_ok=True)  # the journal's own, which is none of a living process: the file is held by this one
    if not path.is_file():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)


class StudyFile:
    """A study's trials: asked for, told of, counted."""

    def __init__(self, study: Any, settings: SearchSettings, objectives: Sequence[Objective], space: Space) -> None:
        self.study, self.settings, self.objectives, self.space = study, settings, tuple(objectives), space
        study.pruner = _pruner(settings, len(self.objectives))

    @property
    def trials(self) -> list[Any]:
        """All trials, by number."""
        found: list[Any] = self.study.get_trials(deepcopy=False)
        return found

    @property
    def spent(self) -> int:
        """Trials that count: those that ended, well, early or by a fault of their own; not those that were killed."""
        return sum(_ended(trial) for trial in self.trials)

    # -- opening -------------------------------------------------------------------------------------------------------

    def check(self, path: Path, facts: Mapping[str, Any]) -> bool:
        """Refuse to go on with a study of something else.

        False: it is to be made anew. Either no trial of it has ended or waits to be run again, as where its objectives
        were no figures of a run; or nothing has ended and only the objectives are others, whose directions stay what
        they were.
        """
        now: dict[str, Any] = json.loads(json.dumps(dict(facts)))
        was: dict[str, Any] = self.study.user_attrs.get("facts", {})
        if was == now:
            return True
        other = [name for name in {**was, **now} if was.get(name) != now.get(name)]
        void = {_origin(trial) for trial in self.trials if trial.user_attrs.get("void")}
        begun = any(_ended(trial) or _origin(trial) not in void for trial in self.trials)
        if begun and (self.spent or other != ["objectives"]):
            what = "; ".join(f"{name} was {_short(was.get(name))}, is {_short(now.get(name))}" for name in other)
            raise OptionError(f"{path} holds another search ({what}): name another folder")
        if self.trials or [d.name.lower() for d in self.study.directions] != [o.direction for o in self.objectives]:
            return False
        self.study.set_user_attr("facts", now)
        return True

    def take_up(self) -> None:
        """Mark what was running as interrupted, and queue it again. Safe to be killed in, and to be repeated."""
        optuna = import_optuna()
        state = optuna.trial.TrialState
        for trial in self.trials:
            if trial.state == state.RUNNING:
                self._interrupt(trial.number)
        followed = {trial.user_attrs.get("after") for trial in self.trials}
        for trial in self.trials:
            if trial.user_attrs.get("interrupted") and trial.number not in followed:
                self.study.add_trial(
                    optuna.create_trial(
                        state=state.WAITING,
                        system_attrs={"fixed_params": trial.params},
                        user_attrs={"retry_of": _origin(trial), "after": trial.number},
                        intermediate_values=trial.intermediate_values,
                    )
                )

    def _interrupt(self, number: int) -> None:
        optuna = import_optuna()
        trial = optuna.trial.Trial(self.study, self.trials[number]._trial_id)
        trial.set_user_attr("interrupted", True)
        self.study.tell(number, state=optuna.trial.TrialState.FAIL)

    # -- asking --------------------------------------------------------------------------------------------------------

    def ask(self) -> Asked:
        """The next trial: one that was interrupted, else new values."""
        optuna = import_optuna()
        trials = self.trials
        drawn = sum("retry_of" not in trial.user_attrs for trial in trials)
        mixed = hashlib.sha256(f"{self.settings.sampler_seed}/{drawn}".encode()).digest()  # no two alike
        seed = int.from_bytes(mixed[:4], "big")
        if self.settings.sampler == "random":
            self.study.sampler = optuna.samplers.RandomSampler(seed=seed)
        else:
            self.study.sampler = optuna.samplers.TPESampler(seed=seed, multivariate=False)
        trial = self.study.ask()
        params = draw(self.space, trial)
        return Asked(trial.number, int(trial.user_attrs.get("retry_of", trial.number)), params, trial)

    def twin(self, asked: Asked) -> Any | None:
        """A trial with the same values that has ended well or early, whose outcome is then this one's too."""
        state = import_optuna().trial.TrialState
        own = self.trials[asked.number].params
        for trial in self.trials[: asked.number]:
            if trial.state in (state.COMPLETE, state.PRUNED) and trial.params == own:
                return trial
        return None

    # -- telling -------------------------------------------------------------------------------------------------------

    def report(self, asked: Asked, step: int, value: float) -> bool:
        """Note how a trial is doing; whether it is hopeless. Never so with two objectives."""
        if len(self.objectives) > 1:
            return False
        if step not in self.trials[asked.number].intermediate_values:  # the attempt before may have got here
            asked.trial.report(value, step)
        return bool(asked.trial.should_prune())

    def found(self, asked: Asked, figures: Mapping[str, float], seconds: float, twin_of: int | None = None) -> None:
        """A trial ended well."""
        values = self.values(figures)
        asked.trial.set_user_attr("figures", {name: float(value) for name, value in figures.items()})
        self._note(asked, seconds, twin_of)
        self.study.tell(asked.number, values)

    def values(self, figures: Mapping[str, float]) -> list[float]:
        """The objectives among a run's figures; one that is not there, or no number, is an error."""
        values = []
        for objective in self.objectives:
            value = figures.get(objective.metric)
            if value is None:
                raise UnknownObjectiveError(
                    f"objective {objective.metric!r}: a run has no such figure.{nearest(objective.metric, figures)}"
                )
            if not math.isfinite(value):
                raise ArithmeticError(f"{objective.metric} is {value}")
            values.append(float(value))
        return values

    def pruned(self, asked: Asked, seconds: float, twin_of: int | None = None) -> None:
        """A trial was ended early: Optuna takes its last report for its value."""
        self._note(asked, seconds, twin_of)
        self.study.tell(asked.number, state=import_optuna().trial.TrialState.PRUNED)

    def failed(self, asked: Asked, reason: str, seconds: float) -> None:
        """A trial ended by a fault of its own, and is not tried again."""
        asked.trial.set_user_attr("error", reason)
        self._note(asked, seconds, None)
        self.study.tell(asked.number, state=import_optuna().trial.TrialState.FAIL)

    def void(self, asked: Asked) -> None:
        """A trial was asked for figures that no run has: as if it had not been."""
        asked.trial.set_user_attr("void", True)
        self.study.tell(asked.number, state=import_optuna().trial.TrialState.FAIL)

    def interrupted(self, asked: Asked) -> None:
        """A trial was stopped from outside: it runs again when the study is opened next."""
        self._interrupt(asked.number)

    @staticmethod
    def _note(asked: Asked, seconds: float, twin_of: int | None) -> None:
        asked.trial.set_user_attr("seconds", round(seconds, 3))
        if twin_of is not None:
            asked.trial.set_user_attr("twin_of", twin_of)

    def best(self) -> list[int]:
        """Numbers of the best trial, or with two objectives of the Pareto front, the first objective's best first."""
        state = import_optuna().trial.TrialState
        if not any(trial.state == state.COMPLETE for trial in self.trials):
            return []
        if len(self.objectives) == 1:
            return [self.study.best_trial.number]
        front: dict[tuple[float, ...], Any] = {}
        for trial in self.study.best_trials:
            front.setdefault(tuple(trial.values), trial)  # of equal ones the first
        ordered = sorted(front.values(), key=lambda trial: -self.objectives[0].better * trial.values[0])
        return [trial.number for trial in ordered]


def _pruner(settings: SearchSettings, objectives: int) -> Any:
    pruners = import_optuna().pruners
    start, warmup = settings.stop_after_trials, settings.stop_after_step
    if settings.stop_hopeless == "none" or objectives > 1:
        return pruners.NopPruner()
    if settings.stop_hopeless == "median":
        return pruners.MedianPruner(n_startup_trials=start, n_warmup_steps=warmup)
    return pruners.PercentilePruner(settings.stop_percentile, n_startup_trials=start, n_warmup_steps=warmup)


def _ended(trial: Any) -> bool:
    attrs = trial.user_attrs
    return trial.state.name in ("COMPLETE", "PRUNED") or ("error" in attrs and not attrs.get("interrupted"))


def _origin(trial: Any) -> int:
    return int(trial.user_attrs.get("retry_of", trial.number))


def _short(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 120 else f"{text[:117]}..."
