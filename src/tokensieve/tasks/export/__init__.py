"""`tokensieve export`: a CLIP's image tower, reduced or not, in a file, and how fast it is there."""
