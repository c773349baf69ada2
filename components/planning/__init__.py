"""How a job would behave with other settings or hardware: a simulation of generators, slots, trainer and hand-over."""
