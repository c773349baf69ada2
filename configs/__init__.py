"""The configs that come with Leeway, as YAML files: `leeway ls` lists them."""
