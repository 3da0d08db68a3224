"""`evrun doctor`: what this machine has, whether a checkpoint fits, how fast it will run, what would help most."""
