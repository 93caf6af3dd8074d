"""Programs that use a DSPARK server, and the SmolLM2 pair they can be tried with."""
