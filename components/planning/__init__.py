"""How a job would behave with other settings or hardware: simulated generators, slots, trainer and weight sync."""
