"""Generators: environments run against vLLM and give trajectory groups, under weights proven equal to the trainer's."""
