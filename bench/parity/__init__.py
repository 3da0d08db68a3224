"""`evrun bench parity`: do all backends, worlds and devices compute the same function, and is a different token a fault or a near tie?"""
