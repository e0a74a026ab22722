"""Searches: trials that are evaluations, and trials that are training runs. Each task owns its search space."""
