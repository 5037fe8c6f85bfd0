"""Running Perdure: the supervisor, the command line, model downloads, benchmarks, chaos. May import everything."""
