"""nestrec trains and serves large sequence (generative) recommenders, from a laptop CPU to a cluster."""

__version__ = "0.1.0"
