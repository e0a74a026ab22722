"""Models of real weights. Imports model libraries, and nothing of tokensieve but errors."""
