"""Recipes: each wires the components into one job. `leeway ls` lists them."""
