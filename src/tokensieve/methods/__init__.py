"""One published method, one short file; each turns a TokenView into a Reduction.

Imports core only. Methods never see a model. `registry` knows them by name and imports a file when it is asked for.
"""

from tokensieve.methods.registry import list_methods, make_method, register_method

__all__ = ["list_methods", "make_method", "register_method"]
