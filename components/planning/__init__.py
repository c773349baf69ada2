"""What a job would do elsewhere or otherwise: a simulation of generators, slots, window, trainer and hand-over."""
