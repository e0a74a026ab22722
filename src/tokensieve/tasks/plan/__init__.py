"""What a job costs on a GPU with and without token reduction, before any weights are loaded: `tokensieve plan`."""
