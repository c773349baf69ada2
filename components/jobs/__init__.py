"""The two jobs of a run, `explore` and `train`: how they meet and what they say to each other, in a folder of files."""
