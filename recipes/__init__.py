"""Recipes: each wires the components into one job. `leeway ls` lists them."""

if __name__ != "leeway.recipes":
    raise ImportError(f"{__name__}: got an import of the folder, expected the package: import leeway.recipes")
