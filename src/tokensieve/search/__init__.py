"""Search: Optuna on one machine, Ray on many. Imports nothing of the tasks: a trial is a function that is passed in.

A search is a space of values by name (`Space`), one or two objectives, and a `Run` that gives a trial's figures.
"""

from tokensieve.search.local import Hopeless, Report
from tokensieve.search.run import Outcome, Search, run_search
from tokensieve.search.settings import ManagerSettings, Objective, SearchSettings
from tokensieve.search.space import Parameter, Space
from tokensieve.search.study import Found

__all__ = [
    "Found",
    "Hopeless",
    "ManagerSettings",
    "Objective",
    "Outcome",
    "Parameter",
    "Report",
    "Search",
    "SearchSettings",
    "Space",
    "run_search",
]
