"""The model and everything around it. The only package that imports transformers."""
