"""Generators: environments run against vLLM and become trajectory groups, under weights that were proven equal to the trainer's."""
