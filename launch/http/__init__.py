"""The OpenAI-compatible front end: a process of its own, torch-free, one more client of the coordinator's request socket."""
