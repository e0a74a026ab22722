"""One folder or file an application: what uses the adapters. Imports adapters, methods, core, results."""
