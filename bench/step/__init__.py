"""`evrun bench step`: a whole prefill and whole decode steps, phase by phase."""
