"""Tensor algebra of token reduction: torch only, no model library, no configuration.

`budget` and `cost` need not even torch. Methods are built from `score`, `select` and `merge`; they are handed a
`TokenView` and give back a `Reduction`.
"""
