"""Ships with the package: the contract every method passes, and tiny models of every family to try things on.

Imports adapters, methods and core; model libraries only when a model is built, pytest only in `contract_cases`.
"""

from tokensieve.testing.contract import ContractError, check_method, contract_cases
from tokensieve.testing.models import TinyModel, tiny_model, tiny_models

__all__ = ["ContractError", "TinyModel", "check_method", "contract_cases", "tiny_model", "tiny_models"]
