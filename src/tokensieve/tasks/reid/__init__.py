"""Multi-modal re-identification: data, model, training and evaluation of RGB / NIR / TIR sets."""
